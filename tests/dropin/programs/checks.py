"""The checks of a program, run one after the other on every rank.

    torchrun --nproc-per-node 4 program.py FOLDER [CHECK ...]

Rank 0 prints `passed: CHECK` for each. The first that fails ends the program, and the rank says `failed: CHECK => why`.
The checks that are named are left out.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor


def say(line):
    print(f"{line}\n", end="", flush=True)  # one write: other ranks write to the same pipe


def run(checks):
    folder, done = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    for number, (name, check) in enumerate(checks.items()):
        if name in done:
            continue
        own = folder / str(number)
        own.mkdir(parents=True, exist_ok=True)
        try:
            check(own)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            say(f"failed: {name} => {reason}")
            raise
        dist.barrier()
        if dist.get_rank() == 0:
            say(f"passed: {name}")
    say(f"rank {dist.get_rank()}: all equal to one device, with {DTensor.__module__}")
    dist.destroy_process_group()
