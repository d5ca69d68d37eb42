"""Kill ranks at random moments of saves, and load what is left.

    python -m tests.checkpoint.killing --kills 100 --seed 0

Four gloo processes load the latest checkpoint and save without end, in turns by `save` and by all ways of
`async_save`. At a random moment one of them is killed, or all. Then the latest checkpoint must load, bit by bit what
was saved, and it may not be older than what any rank knows to be complete. The next four processes go on from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise import DTensor, Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh, simulate
from shardwise.errors import CheckpointError

RANKS = 4
PLACEMENTS: dict[str, Any] = {
    "sharded": [Shard(0), Shard(1)],
    "replicated": [Replicate(), Replicate()],
    "mixed": [Replicate(), Shard(0)],
}


def whole(step: int) -> torch.Tensor:
    return torch.arange(float(1 << 18)).view(512, -1) + step


def train(rank: int, store: str, folder: str, pipe: Connection) -> None:
    """Load and save until this process or another one is killed."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensors: dict[str, DTensor] = {
        name: distribute_tensor(whole(0), mesh, placements, src_data_rank=None)
        for name, placements in PLACEMENTS.items()
    }
    state: dict[str, Any] = {"tensors": tensors, "step": 0}
    if checkpoint.latest(folder):
        checkpoint.load(state, folder)
    else:
        checkpoint.save(state, Path(folder) / "step-0")
    for tensor in tensors.values():
        tensor.add_(0)  # the first call of an op is slow
    pipe.send(("ready", state["step"]))
    saving = None
    with suppress(CheckpointError):  # another rank was killed
        while True:
            state["step"] += 1
            for tensor in tensors.values():
                tensor.add_(1)  # while the save in the background goes on
            path = Path(folder) / f"step-{state['step']}"
            if state["step"] % 4:
                staging = ("buffer", "snapshot", "deferred")[state["step"] % 4 - 1]
                background = checkpoint.async_save(state, path, keep=3, staging=staging)
                background.staged()
                if saving is not None:
                    pipe.send(("complete", state["step"] - 1))
                saving = background
            else:
                checkpoint.save(state, path, keep=3, progress=False)
                pipe.send(("complete", state["step"]))
                saving = None
        raise AssertionError("never")
    pipe.send(("survived", rank))


def check(path: Path) -> int:
    """Load a checkpoint without a world; returns its step."""
    state: dict[str, Any] = {"tensors": {name: torch.zeros(512, 512) for name in PLACEMENTS}, "step": 0}
    checkpoint.load(state, path)
    for name, tensor in state["tensors"].items():
        assert torch.equal(tensor, whole(state["step"])), f"{name} in {path} is not that of step {state['step']}"
    assert path.name == f"step-{state['step']}"
    return state["step"]


class Trial:
    """Four processes, until one of them is killed."""

    def __init__(self, folder: str, number: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, f"{folder}/../store-{number}", folder, there)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, chance: random.Random) -> tuple[int, int]:
        """Kill at a random moment; returns the last step known to be complete, and how many ranks raised an error."""
        known = max(self._ready(pipe) for pipe in self.pipes)
        time.sleep(chance.uniform(0.0, 1.5))
        victims = range(RANKS) if chance.random() < 0.3 else [chance.randrange(RANKS)]
        for rank in victims:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        for process in self.processes:
            process.join(20)
        survived = 0
        for pipe in self.pipes:
            with suppress(EOFError, OSError):
                while pipe.poll(0):
                    kind, value = pipe.recv()
                    known = max(known, value) if kind == "complete" else known
                    survived += kind == "survived"
        self.close()
        return known, survived + len(victims)

    def _ready(self, pipe: Connection) -> int:
        assert pipe.poll(120), "a process did not start"
        kind, step = pipe.recv()
        assert kind == "ready"
        return step

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def warm_up() -> None:
    """Import and plan in this process all that its children will need: they are forked from it."""
    with tempfile.TemporaryDirectory() as folder, simulate(RANKS):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        state = {name: distribute_tensor(whole(0), mesh, placements) for name, placements in PLACEMENTS.items()}
        for tensor in state.values():
            tensor.add_(1)
        checkpoint.save(state, f"{folder}/x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    torch.set_num_threads(1)
    warm_up()
    interrupted = unfinished = 0
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "runs"
        folder.mkdir()
        last = 0
        for kill in range(options.kills):
            known, ended = Trial(str(folder), kill).run(chance)
            unfinished += ended < RANKS
            latest = checkpoint.latest(folder)
            interrupted += any(path.name.endswith(".saving") for path in folder.glob(".step*"))
            found = check(latest) if latest else 0
            assert found >= max(known, last), f"latest is step {found}, but {max(known, last)} was complete"
            for path in folder.glob("step-*") if kill % 10 == 0 else ():
                check(path)
            last = found
            print(f"kill {kill}: step {found} loads", file=sys.stderr, flush=True)
    print(f"{options.kills} kills, {interrupted} left a save behind, {unfinished} left ranks waiting; steps: {last}")


if __name__ == "__main__":
    main()
