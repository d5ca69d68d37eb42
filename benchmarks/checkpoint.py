"""Saving and loading: shardwise.checkpoint beside plain torch.distributed.checkpoint, on the same tensors and disk.

    python benchmarks/checkpoint.py [--print]

Four gloo processes hold the same DTensors for both libraries, which take turns. Both have all data on the disk when a
save returns. "Blocked" is how long async_save keeps the program, "planning" what a second save of the same state spends
before it writes, "memory" how far the peak of a process rises above what it held before (a snapshot is another process,
which shares the memory of the first until it is written).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
import torch.multiprocessing as mp
from report import Report
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from shardwise import Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh
from shardwise.checkpoint.plan import plan_save
from shardwise.checkpoint.ranks import ranks_of_world
from shardwise.checkpoint.state import flatten, state_dicts

RANKS = 4
REPEATS = 5
MIB = 2**20


def states() -> dict[str, dict[str, Any]]:
    """States to save: names, and sizes in bytes, of float32 tensors of 1024 columns."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def tensors(sizes: dict[str, int], placement: Any) -> dict[str, Any]:
        return {
            name: distribute_tensor(torch.arange(size // 4).float().view(-1, 1024), mesh, [placement])
            for name, size in sizes.items()
        }

    layers = {f"layers.{i}.weight": 4 * MIB for i in range(12)}
    small = {f"norms.{i}.weight": 4096 for i in range(200)}
    return {
        "replicated, one tensor of 48 MiB and 12 of 4": tensors({"embedding": 48 * MIB, **layers}, Replicate()),
        "sharded, the same": tensors({"embedding": 48 * MIB, **layers}, Shard(0)),
        "replicated, 200 tensors of 4 KiB and as many numbers": tensors(small, Replicate())
        | {f"options.{i}": i % 7 for i in range(200)},
    }


class Timed(DefaultSavePlanner):
    """PyTorch's planner, with a clock."""

    seconds = 0.0

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._begin = time.perf_counter()
        super().set_up_planner(*args, **kwargs)

    def finish_plan(self, new_plan: Any) -> Any:
        found = super().finish_plan(new_plan)
        Timed.seconds = time.perf_counter() - self._begin
        return found


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all processes have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def rise(work: Callable[[], Any]) -> float:
    """How many MiB the peak memory of this process rises."""

    def read(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def agreed(value: float) -> float:
    """The largest value of all processes."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Library:
    """One library's calls, each with a folder of its own for a save."""

    def __init__(self, name: str, folder: Path, state: dict[str, Any]) -> None:
        self.name, self.folder, self.state, self.count = name, folder / name, state, 0
        self.figures: dict[str, list[float]] = {"save": [], "load": [], "blocked": [], "planning": [], "memory": []}

    def path(self) -> str:
        self.count += 1
        if dist.get_rank() == 0:
            for old in self.folder.glob("*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return str(self.folder / str(self.count))

    def save(self, path: str) -> None:
        if self.name == "shardwise":
            checkpoint.save(self.state, path, progress=False)
        else:
            theirs.save(self.state, storage_writer=FileSystemWriter(path), planner=Timed())

    def load(self, path: str) -> None:
        if self.name == "shardwise":
            checkpoint.load(dict(self.state), path, progress=False)
        else:
            theirs.load(dict(self.state), checkpoint_id=path)

    def start(self, path: str) -> Callable[[], Any]:
        if self.name == "shardwise":
            return checkpoint.async_save(self.state, path).wait
        return theirs.async_save(self.state, storage_writer=FileSystemWriter(path)).result

    def planning(self) -> float:
        if self.name == "PyTorch":
            return Timed.seconds
        return timed(lambda: plan_save(flatten(state_dicts(self.state)), ranks_of_world(), ""))

    def measure(self) -> None:
        path = self.path()
        self.figures["save"].append(timed(lambda: self.save(path)))
        self.figures["planning"].append(agreed(self.planning()))
        self.figures["load"].append(timed(lambda: self.load(path)))
        path = self.path()
        dist.barrier()
        begin = time.perf_counter()
        wait = self.start(path)
        blocked = time.perf_counter() - begin
        wait()  # before any other collective: PyTorch's save in the background uses the same group
        self.figures["blocked"].append(agreed(blocked))

    def measure_memory(self) -> None:
        path = self.path()
        self.figures["memory"].append(agreed(rise(lambda: self.save(path))))
        self.figures["memory"].append(agreed(rise(lambda: self.load(path))))
        path = self.path()
        self.figures["memory"].append(agreed(rise(lambda: self.start(path)())))


def on_gloo(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    results = []
    for number, (title, state) in enumerate(states().items()):
        both = [Library(name, Path(folder) / str(number), state) for name in ("shardwise", "PyTorch")]
        for library in both:
            path = library.path()
            library.save(path)
            library.load(path)
            library.measure_memory()
        for turn in range(REPEATS):
            for library in both if turn % 2 else both[::-1]:
                library.measure()
        results.append((title, rows_of(both, sum(v.numel() * 4 for v in state.values() if hasattr(v, "numel")))))
        if rank == 0:
            torch.save(results, f"{folder}/rows")
    dist.barrier()
    dist.destroy_process_group()


HEADER = ["", "save GB/s", "load GB/s", "save, of PyTorch's speed", "load", "blocked ms", "of its save", "planning ms"]
HEADER += ["memory of save MiB", "of load", "of async_save"]


def rows_of(both: list[Library], nbytes: int) -> list[list[str]]:
    rows = []
    reference = both[1].figures
    for library in both:
        figures = library.figures
        save, load, blocked = median(figures["save"]), median(figures["load"]), median(figures["blocked"])
        rows.append(
            [
                library.name,
                f"{nbytes / save / 1e9:.3f}",
                f"{nbytes / load / 1e9:.3f}",
                f"{median(reference['save']) / save:.2f}",
                f"{median(reference['load']) / load:.2f}",
                f"{blocked * 1e3:.1f}",
                f"{blocked / save:.1%}",
                f"{median(figures['planning']) * 1e3:.1f}",
                f"{figures['memory'][0]:.0f}",
                f"{figures['memory'][1]:.0f}",
                f"{figures['memory'][2]:.0f}",
            ]
        )
    return rows


def blocked(folder: Path) -> list[list[str]]:
    """How long each way of saving in the background keeps a process with 1 GiB, beside a save that waits."""
    state = {"x": torch.arange(2**28).float()}
    ways: dict[str, Callable[[str], Any]] = {
        "snapshot": lambda path: checkpoint.async_save(state, path, staging="snapshot").wait,
        "buffer": lambda path: checkpoint.async_save(state, path, staging="buffer").wait,
        "PyTorch": lambda path: theirs.async_save(state, checkpoint_id=path, no_dist=True).result,
    }
    times: dict[str, list[float]] = {"save": [], **{name: [] for name in ways}}
    for _ in range(REPEATS + 1):  # the first time makes buffers
        begin = time.perf_counter()
        checkpoint.save(state, folder / "save", progress=False)
        times["save"].append(time.perf_counter() - begin)
        for name, start in ways.items():
            begin = time.perf_counter()
            wait = start(str(folder / name))
            times[name].append(time.perf_counter() - begin)
            wait()
    save = median(times["save"][1:])
    return [[name, f"{median(times[name][1:]) * 1e3:.0f}", f"{median(times[name][1:]) / save:.1%}"] for name in times]


def main() -> None:
    at = sys.argv[sys.argv.index("--folder") + 1] if "--folder" in sys.argv else None
    report = Report("checkpoint")
    with tempfile.TemporaryDirectory(dir=at) as folder:
        mp.start_processes(on_gloo, (folder,), nprocs=RANKS, start_method="fork")
        results = torch.load(f"{folder}/rows")
        warnings.simplefilter("ignore")
        one_process = blocked(Path(folder))
    report.add(
        f"{RANKS} gloo processes; medians of {REPEATS} runs in turns; load of the machine {os.getloadavg()[0]:.1f}."
    )
    for title, rows in results:
        report.table(title[0].upper() + title[1:], HEADER, rows)
    report.table("Blocked by async_save: one process, 1 GiB", ["", "ms", "of shardwise's save"], one_process)
    report.save()


if __name__ == "__main__":
    main()
