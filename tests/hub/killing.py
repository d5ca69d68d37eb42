"""Kill ranks at random moments of `hub.save`, and read the folder that is left.

    python -m tests.hub.killing --kills 20 --seed 0

Four gloo processes save a model over and over into one folder, each time with other values. At a random moment one of
them is killed, or all. The folder must then be a complete model that was saved: the last that a rank knows to be
complete, or a later one. The other ranks must end with an error. The next four processes save into the same folder, and
leave nothing beside it.
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise import Shard, hub, init_device_mesh, shard_parameters, simulate
from shardwise.errors import CheckpointError

RANKS = 4
LIMIT = 20.0
"""Seconds within which the ranks that are left must end."""
SHARD_SIZE = 60_000
"""Bytes of a file: the model has several, and an index."""


def model_of(step: int) -> nn.Module:
    """A model all of whose parameters have one value."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    config.step = step
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def rows(name: str, parameter: Tensor) -> list[Shard]:
    return [Shard(0)]


def train(rank: int, store: str, folder: str, first: int, pipe: Connection) -> None:
    """Save until somebody kills this process, or another one was killed."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=limit)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model: Any = shard_parameters(model_of(first), mesh, rows, src_data_rank=None)
    step = first
    try:
        while True:
            hub.save(model, folder, max_shard_size=SHARD_SIZE, sync=False, progress=False)
            pipe.send(("complete", step))
            step += 1
            model.config.step = step
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
    except CheckpointError as error:
        pipe.send(("survived", str(error)))


def step_of(folder: Path) -> int:
    """Read a folder as transformers does; returns its step. All of it must be of one step."""
    step = json.loads((folder / "config.json").read_text())["step"]
    expected = model_of(step)
    found = transformers.LlamaForCausalLM.from_pretrained(folder)
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), f"{name} in {folder} is not that of step {step}"
    named = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    there = {path.name for path in folder.glob("*.safetensors")}
    assert there == named, there ^ named
    for name in named:
        assert all(bool((tensor == step).all()) for tensor in load_file(folder / name).values())
    return step


class Ended(NamedTuple):
    """How a trial ended."""

    complete: int
    """The last step that a rank knows to be complete."""
    errors: list[str]
    """Those that the ranks that were not killed ended with."""
    killed: int
    seconds: float


class Trial:
    """Four processes, until one of them is killed."""

    def __init__(self, root: Path, number: int, first: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(RANKS):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, str(root / f"store-{number}"), str(root / "saved" / "model"), first, there)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, chance: random.Random) -> Ended:
        """Kill at a random moment after the first save that is complete."""
        complete = 0
        for pipe in self.pipes:
            assert pipe.poll(120), "a process did not start"
            complete = max(complete, pipe.recv()[1])
        time.sleep(chance.uniform(0.0, 0.5))
        victims = list(range(RANKS)) if chance.random() < 0.2 else [chance.randrange(RANKS)]
        for rank in victims:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        begin = time.monotonic()
        errors: list[str] = []
        for rank, pipe in enumerate(self.pipes):
            with suppress(EOFError, OSError):
                while pipe.poll(max(0.0, begin + LIMIT - time.monotonic())):
                    kind, value = pipe.recv()
                    complete = max(complete, value) if kind == "complete" else complete
                    errors += [value] if kind == "survived" and rank not in victims else []
        seconds = time.monotonic() - begin
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        return Ended(complete, errors, len(victims), seconds)


def warm_up(root: Path) -> None:
    """Import and plan in this process what its children will need: they are forked from it."""
    with simulate(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        model: Any = shard_parameters(model_of(0), mesh, rows)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        hub.save(model, root / "warm")


def kill_and_check(kills: int, seed: int, root: Path) -> tuple[int, float]:
    """Returns how many kills left a folder behind, and the most seconds in which the other ranks ended."""
    transformers.utils.logging.disable_progress_bar()
    warm_up(root)
    chance, folder = random.Random(seed), root / "saved" / "model"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("words")
    step, left, slowest = 0, 0, 0.0
    for number in range(kills):
        ended = Trial(root, number, step + 1).run(chance)
        assert len(ended.errors) == RANKS - ended.killed, f"{ended}: some rank neither ended nor raised"
        assert all("another rank died or left" in error for error in ended.errors), ended.errors
        step = step_of(folder)
        assert step in (ended.complete, ended.complete + 1), f"step {step} is there, and {ended.complete} was complete"
        assert (folder / "tokenizer.json").read_text() == "words"
        left += len(list(folder.parent.iterdir())) > 1
        slowest = max(slowest, ended.seconds)
        print(f"kill {number}: step {step} is complete", file=sys.stderr, flush=True)
    hub.save(model_of(step + 1), folder, max_shard_size=SHARD_SIZE)
    assert step_of(folder) == step + 1
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "a later save removes what is left"
    return left, slowest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        left, slowest = kill_and_check(options.kills, options.seed, Path(root))
    print(f"{options.kills} kills, {left} left a folder behind; the others ended in at most {slowest:.1f} s")


if __name__ == "__main__":
    main()
