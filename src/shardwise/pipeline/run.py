"""A pipeline: the stages of this process, and a training step over all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import pytree
from .._torch.modules import modules_of
from ..errors import InputError
from ..sharding.mesh import DeviceMesh, mesh_info_of
from ..sharding.placement import Placements
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor
from ..world import RankTensor, current_world
from .norm import clip_by_norm, norm_of_all
from .schedule import Action, schedule
from .stages import stage_meshes
from .ties import Ties, separate, ties_between
from .transfer import Courier, Mailbox, without_partial

__all__ = ["Pipeline"]

T = TypeVar("T")


class Pipeline(nn.Module):
    """A model in stages, each on the ranks at one index of a mesh axis.

    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    >>> def parallelize(stage, submesh):                 # the axes dp and tp, on the ranks of this stage
    ...     parallelize_module(stage, submesh, PLAN)
    ...     fully_shard(stage, mesh=submesh["dp"])
    >>> model = Pipeline([first, second], mesh, "pp", parallelize, loss_fn=loss, microbatches=4, placements=P("dp"))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = model.step(tokens, target=targets)        # forward and backward
    >>> model.clip_grad_norm_(1.0)
    >>> optimizer.step()

    All ranks create it with all stages, and call its methods with the same arguments. Stage s is on rank s % n of the
    axis, which has n ranks. A process keeps its own stages and drops the others; a simulated world keeps all. The
    parameters, state dict and gradients are those of the stages in this process: `0.weight` is `weight` of stage 0.

    `parallelize(stage, submesh)` is called for each stage in this process. `placements` are those of batches on the
    mesh of a stage; None passes plain tensors. `schedule` is "gpipe" or "1f1b"; with several stages on a rank, "1f1b"
    is interleaved. A stage's outputs are the arguments of the next stage.

    Stages may share parameters (`head.weight = words.weight`). Each stage then has a copy, and `step` gives all copies
    the sum of their gradients.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
        axis: str,
        parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None,
        *,
        loss_fn: Callable[..., Tensor],
        microbatches: int,
        schedule: str = "1f1b",
        placements: Placements | None = None,
    ) -> None:
        super().__init__()
        self.meshes = stage_meshes(mesh, axis)
        self.mesh, self.axis, self.stage_count = mesh, axis, len(stages)
        self.loss_fn, self.microbatches, self.schedule, self.placements = loss_fn, microbatches, schedule, placements
        self.simulated = current_world() is not None
        ties = ties_between(stages)
        separate(stages, ties)
        for index, stage in enumerate(stages):
            if self.simulated or not mesh_info_of(self.mesh_of(index)).outside:
                self.add_module(str(index), stage)
                if parallelize is not None:
                    parallelize(stage, self.mesh_of(index))
        self.courier = (Mailbox if self.simulated else Courier)(self.mesh_of, mesh, axis)
        self.ties = Ties(ties, lambda stage: modules_of(self).get(str(stage)), self.courier)

    def mesh_of(self, stage: int) -> DeviceMesh:
        """Return the mesh of a stage."""
        return self.meshes[stage % len(self.meshes)]

    def step(self, *args: Tensor, target: object = None, **loss_kwargs: object) -> Tensor:
        """Run the batch forward and backward, and return its loss on every rank.

        Gradients are added to `.grad`, as by `loss.backward()`. The batch is split along dim 0 into microbatches, whose
        losses are weighted by their rows: if `loss_fn` is a mean over rows, the result is the mean over the batch.
        """
        return _Step(self, args, target, loss_kwargs).run(train=True)

    @torch.no_grad()
    def evaluate(self, *args: Tensor, target: object = None, **loss_kwargs: object) -> Tensor:
        """Run the batch forward, and return its loss on every rank."""
        return _Step(self, args, target, loss_kwargs).run(train=False)

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error: no rank has the outputs of all stages."""
        raise InputError(
            "a Pipeline was called, but no rank has the outputs of all stages",
            "use pipeline.step(x, target=y), or pipeline.evaluate(x, target=y)",
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their common norm is at most `max_norm`; return the norm."""
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        copies = {id(parameter) for parameter in self.ties.copies()}  # a shared parameter counts once, as on one device
        norm = norm_of_all([p.grad for p in parameters if p.grad is not None and id(p) not in copies], norm_type)
        if not self.simulated:
            group = self.courier.groups[False]  # type: ignore[union-attr]
            norm = norm.to(self.mesh.device_type)
            if norm_type == float("inf"):
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
            else:
                norm = norm.pow(norm_type)
                dist.all_reduce(norm, group=group)
                norm = norm.pow(1 / norm_type)
        clip_by_norm(parameters, max_norm, norm)
        return norm


class _Step:
    """One batch that passes through the stages."""

    def __init__(
        self, pipeline: Pipeline, args: Sequence[Tensor], target: object, loss_kwargs: dict[str, object]
    ) -> None:
        self.pipeline, self.courier, self.loss_kwargs = pipeline, pipeline.courier, loss_kwargs
        self.last = pipeline.stage_count - 1
        self.args, self.targets = _split(tuple(args), pipeline.microbatches), _split(target, pipeline.microbatches)
        rows = [len(pytree.tree_leaves(each)[0]) for each in self.args]
        self.weights = [count / sum(rows) for count in rows]
        self.keys = [tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(each)) for each in self.args]
        self.for_backward: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        """By stage and microbatch, the inputs and outputs that require gradients."""
        self.losses: list[Tensor] = []

    def run(self, train: bool) -> Tensor:
        pipeline, ranks = self.pipeline, len(self.pipeline.meshes)
        actions = schedule(
            pipeline.schedule, ranks=ranks, stages=pipeline.stage_count, microbatches=pipeline.microbatches
        )
        if train:
            pipeline.ties.begin()
        for action in actions:
            if str(action.stage) in modules_of(pipeline) and (train or not action.backward):
                self._backward(action) if action.backward else self._forward(action)
        if train:
            pipeline.ties.sum_gradients(pipeline.microbatches)
        self.courier.finish()
        return self._loss()

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        key = self.keys[microbatch], torch.is_grad_enabled()
        if stage == 0:
            inputs: tuple[object, ...] = self._placed(self.args[microbatch], stage)
        else:
            received = self.courier.receive(action, key)
            inputs = received if isinstance(received, tuple) else (received,)
        outputs = self.pipeline.get_submodule(str(stage))(*inputs)
        if stage == self.last:
            target = self._placed(self.targets[microbatch], stage)
            loss = self.loss_fn(outputs, target) * self.weights[microbatch]
            self.losses.append(loss.detach())
            outputs = loss
        else:
            outputs = without_partial(outputs)
            self.courier.send(Action(False, stage + 1, microbatch), outputs, key)
        if torch.is_grad_enabled():
            self.for_backward[stage, microbatch] = _with_grad(inputs), _with_grad(outputs)

    def loss_fn(self, outputs: object, target: object) -> Tensor:
        if target is None:
            return self.pipeline.loss_fn(outputs, **self.loss_kwargs)
        return self.pipeline.loss_fn(outputs, target, **self.loss_kwargs)

    def _backward(self, action: Action) -> None:
        _, stage, microbatch = action
        inputs, outputs = self.for_backward.pop((stage, microbatch))
        self._reduce_gradients_of(stage, last=microbatch == self.pipeline.microbatches - 1)
        if stage == self.last:
            outputs[0].backward()
        elif outputs:
            gradients = self.courier.receive_gradients(action, outputs)
            torch.autograd.backward(outputs, gradients)
        if stage > 0 and inputs:
            found = [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs]
            self.courier.send_gradients(Action(True, stage - 1, microbatch), found)

    def _reduce_gradients_of(self, stage: int, last: bool) -> None:
        """Reduce the gradients of all microbatches with the last one, if the module of the stage can defer that."""
        set_sync = getattr(self.pipeline.get_submodule(str(stage)), "set_requires_gradient_sync", None)
        if set_sync is not None:
            set_sync(last)

    def _placed(self, value: T, stage: int) -> T:
        placements, mesh = self.pipeline.placements, self.pipeline.mesh_of(stage)
        if placements is None:
            return value
        return pytree.tree_map_only(Tensor, lambda x: distribute_tensor(x, mesh, placements, src_data_rank=None), value)

    def _loss(self) -> Tensor:
        """Return the loss of the batch, received from the ranks of the last stage."""
        pipeline = self.pipeline
        device = torch.device(pipeline.mesh.device_type)
        total = torch.zeros((), device=device)
        if self.losses:
            total = _plain(torch.stack([_plain(loss) for loss in self.losses]).sum())
        if not pipeline.simulated:
            line, groups = self.courier.line, self.courier.groups  # type: ignore[union-attr]
            dist.broadcast(total, src=line[self.last % len(line)], group=groups[False])
        return total


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that is replicated over its mesh as a plain tensor."""
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return local.shards[0] if isinstance(local, RankTensor) else local


def _split(value: T, count: int) -> list[T]:
    """Return a batch as microbatches: its tensors split along dim 0."""
    leaves, tree = pytree.tree_flatten(value)
    pieces = []
    for leaf in leaves:
        if isinstance(leaf, DTensor) or (isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] < count)):
            raise InputError(
                f"a Pipeline got a {type(leaf).__name__} of shape {list(leaf.shape)} as a batch of {count} "
                "microbatches, and splits plain tensors along dim 0",
                f"pass the global batch as a plain tensor of {count} rows or more, and `placements` to the Pipeline",
            )
        pieces.append(leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count)
    return [pytree.tree_unflatten([piece[index] for piece in pieces], tree) for index in range(count)]


def _with_grad(value: object) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
