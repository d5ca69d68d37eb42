"""Pipelines: a model in stages, each on its own submesh, with other parallelism inside the stages.

stages      stage_meshes: the mesh of each stage
schedule    schedule: in which order the stages run microbatches forward and backward
run         Pipeline: the stages of this process, and a training step over all of them
transfer    activations and gradients between stages
ties        parameters that stages share
norm        gradient norms over all stages

The same program runs on processes, where each runs its own stages, and in a simulated world, where one process runs
all stages in an order in which no stage waits for another.
"""

from .run import Pipeline
from .schedule import Action, schedule
from .stages import stage_meshes

__all__ = ["Action", "Pipeline", "schedule", "stage_meshes"]
