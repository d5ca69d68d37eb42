"""Saving and loading: shardwise.checkpoint beside plain torch.distributed.checkpoint, on the same tensors and disk.

    python benchmarks/checkpoint.py [--print] [--folder FOLDER]

Four gloo processes hold the same DTensors for both libraries. Each round runs every operation of one library right
after the same operation of the other, with the order reversed from round to round; figures are medians, ratios are
medians of the ratios of rounds, so that a busy machine slows both. Both libraries call fsync for every file before a
save returns; shardwise also does for the folders. "Blocked" is how long `async_save` takes to return, "planning" what a
second save of the same state spends before it writes, "memory" how far the peak of a process rises above what it held
before.
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
from launch import on_processes
from report import Report
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from shardwise import Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh
from shardwise.checkpoint.plan import plan_save
from shardwise.checkpoint.ranks import ranks_of_world
from shardwise.checkpoint.state import flatten, state_dicts

RANKS = 4
REPEATS = 7
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
    """One library's calls. Each save goes to a folder of its own, which is deleted before the next."""

    def __init__(self, name: str, folder: Path, state: dict[str, Any]) -> None:
        self.name, self.folder, self.state, self.count = name, folder / name, state, 0
        self.figures: dict[str, list[float]] = {name: [] for name in (*self.operations(), "memory")}
        self.saved = ""

    def operations(self) -> dict[str, Callable[[], float]]:
        """What is measured in each round, in this order. An operation returns its seconds."""
        return {
            "save": self.measure_save,
            "planning": self.planning,
            "load": lambda: timed(lambda: self.load(self.saved)),
            "blocked": lambda: self.measure_start(self.start),
            "deferred": lambda: self.measure_start(self.start_deferred),
        }

    def path(self) -> str:
        self.count += 1
        if dist.get_rank() == 0:
            for old in self.folder.glob("*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
            os.sync()  # nothing of an earlier save is left to write
        dist.barrier()
        return str(self.folder / str(self.count))

    def save(self, path: str) -> None:
        if self.name == "shardwise":
            checkpoint.save(self.state, path, progress=False)
        else:
            theirs.save(self.state, storage_writer=FileSystemWriter(path, sync_files=True), planner=Timed())

    def load(self, path: str) -> None:
        if self.name == "shardwise":
            checkpoint.load(dict(self.state), path, progress=False)
        else:
            theirs.load(dict(self.state), checkpoint_id=path)

    def start(self, path: str) -> Callable[[], Any]:
        if self.name == "shardwise":
            return checkpoint.async_save(self.state, path).wait
        return theirs.async_save(self.state, storage_writer=FileSystemWriter(path, sync_files=True)).result

    def start_deferred(self, path: str) -> Callable[[], Any]:
        if self.name == "shardwise":
            return checkpoint.async_save(self.state, path, staging="deferred").wait
        return lambda: None

    def planning(self) -> float:
        if self.name == "PyTorch":
            return Timed.seconds
        return timed(lambda: plan_save(flatten(state_dicts(self.state)), ranks_of_world(), ""))

    def measure_save(self) -> float:
        self.saved = self.path()
        return timed(lambda: self.save(self.saved))

    def measure_start(self, start: Callable[[str], Callable[[], Any]]) -> float:
        path = self.path()
        dist.barrier()
        begin = time.perf_counter()
        wait = start(path)
        blocked = time.perf_counter() - begin
        wait()  # before any other collective: PyTorch's save in the background uses the same group
        return blocked

    def measure_memory(self) -> None:
        path = self.path()
        self.figures["memory"].append(agreed(rise(lambda: self.save(path))))
        self.figures["memory"].append(agreed(rise(lambda: self.load(path))))
        path = self.path()
        self.figures["memory"].append(agreed(rise(lambda: self.start(path)())))


def on_gloo(folder: str) -> list[tuple[str, list[list[str]]]]:
    results = []
    for number, (title, state) in enumerate(states().items()):
        both = [Library(name, Path(folder) / str(number), state) for name in ("shardwise", "PyTorch")]
        for library in both:
            path = library.path()
            library.save(path)
            library.load(path)
            library.measure_memory()
        for turn in range(REPEATS):
            for operation in both[0].operations():
                for library in both if turn % 2 else both[::-1]:
                    library.figures[operation].append(agreed(library.operations()[operation]()))
        results.append((title, rows_of(both, sum(v.numel() * 4 for v in state.values() if hasattr(v, "numel")))))
    return results


HEADER = ["", "save GB/s", "load GB/s", "save, of PyTorch's speed", "load"]
HEADER += ["blocked ms", "of its save", "deferred: blocked ms", "of its save", "planning ms"]
HEADER += ["memory of save MiB", "of load", "of async_save"]


def rows_of(both: list[Library], nbytes: int) -> list[list[str]]:
    rows = []
    reference = both[1].figures
    for library in both:
        figures = library.figures

        def speed(operation: str, figures: dict[str, list[float]] = figures) -> float:
            return median([b / a for a, b in zip(figures[operation], reference[operation], strict=True)])

        def blocked(operation: str, figures: dict[str, list[float]] = figures) -> list[str]:
            share = median([a / b for a, b in zip(figures[operation], figures["save"], strict=True)])
            return [f"{median(figures[operation]) * 1e3:.2f}", f"{share:.1%}"]

        rows.append(
            [
                library.name,
                f"{nbytes / median(figures['save']) / 1e9:.3f}",
                f"{nbytes / median(figures['load']) / 1e9:.3f}",
                f"{speed('save'):.2f}",
                f"{speed('load'):.2f}",
                *blocked("blocked"),
                *(blocked("deferred") if library.name == "shardwise" else ["", ""]),
                f"{median(figures['planning']) * 1e3:.1f}",
                f"{figures['memory'][0]:.0f}",
                f"{figures['memory'][1]:.0f}",
                f"{figures['memory'][2]:.0f}",
            ]
        )
    return rows


BLOCKED_HEADER = ["", "blocked ms", "of shardwise's save", "next update ms", "of shardwise's save"]


def blocked(folder: Path, mib: int, device: str) -> list[list[str]]:
    """How long each way of saving in the background keeps one process, beside a save that waits.

    "Next update" is what an in-place update of the entire state takes right after: it waits for a deferred copy, and
    pays for the pages that the operating system has to copy after a snapshot.
    """
    state = {"x": torch.arange(mib * 2**18, device=device).float()}

    def start(way: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        path = str(folder / way)
        if way == "PyTorch":
            return lambda: None, theirs.async_save(state, checkpoint_id=path, no_dist=True).result
        saving = checkpoint.async_save(state, path, staging=way)  # type: ignore[arg-type]
        return saving.staged if way == "deferred" else lambda: None, saving.wait

    def measure(way: str) -> None:
        begin = time.perf_counter()
        if way == "save":
            checkpoint.save(state, folder / "save", progress=False)
        else:
            staged, wait = start(way)
        times[way][0].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        if way != "save":
            staged()
        state["x"].add_(1)
        if device != "cpu":
            torch.cuda.synchronize()
        times[way][1].append(time.perf_counter() - begin)
        if way != "save":
            wait()
        os.sync()

    ways = ["save", "deferred", "buffer", "PyTorch", *(["snapshot"] if device == "cpu" else [])]
    times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    for group in (ways[:4], ways[4:]):  # a snapshot makes the next writes to all memory slower: after the others
        for _ in range(REPEATS + 1):
            for way in group:
                measure(way)
    save = median(times["save"][0][1:])  # the first round allocates buffers
    rows = []
    for way, (returned, updated) in times.items():
        cells = [f"{value * 1e3:.2f}" for value in (median(returned[1:]), median(updated[1:]))]
        shares = [f"{value / save:.1%}" for value in (median(returned[1:]), median(updated[1:]))]
        rows.append([way, cells[0], shares[0], cells[1], shares[1]])
    checkpoint.release_staging_buffer()
    return rows


def main() -> None:
    at = sys.argv[sys.argv.index("--folder") + 1] if "--folder" in sys.argv else None
    report = Report("checkpoint")
    with tempfile.TemporaryDirectory(dir=at) as folder:
        results = on_processes(on_gloo, RANKS, folder)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        one_process = {
            f"{mib} MiB on the {device.replace('cuda', 'GPU').replace('cpu', 'CPU')}": blocked(
                Path(folder), mib, device
            )
            for device in devices
            for mib in (8, 64, 1024)
        }
    report.add(
        f"{RANKS} gloo processes; medians of {REPEATS} rounds in turns; load of the machine {os.getloadavg()[0]:.1f}."
    )
    for title, rows in results:
        report.table(title[0].upper() + title[1:], HEADER, rows)
    for title, rows in one_process.items():
        report.table(f"Blocked by async_save: one process, {title}", BLOCKED_HEADER, rows)
    report.save()


if __name__ == "__main__":
    main()
