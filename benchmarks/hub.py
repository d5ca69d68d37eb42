"""Loading and saving a model of transformers: bytes, memory and time of each rank, beside gathering on rank 0.

    python benchmarks/hub.py [--print] [--small]

Times are the best of three: on a machine that does other work, too, four busy processes wait for a core more often than
one does. The seconds of CPU time of all ranks together do not depend on that.

Four gloo processes, a Llama in float32. `shardwise.hub` reads and writes shards; the other way is what programs do
without it: rank 0 loads the model and `parallelize_module` sends the shards to the others; `full_tensor()` gathers all
parameters, and rank 0 writes them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launch import on_processes
from report import Report

RANKS = 4
REPEATS = 3
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 8192}
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}


def columns(name: str, parameter: Any) -> Any:
    """Each parameter sharded along its last dim: the shortest runs in the files."""
    import shardwise

    return [shardwise.Shard(parameter.dim() - 1)]


PLANS: dict[str, Any] = {"tensor parallel": "base_model_tp_plan", "fully sharded": "fully_sharded", "columns": columns}


class Usage:
    """Seconds, CPU seconds, bytes read and peak of the memory of this process inside `with`."""

    def __enter__(self) -> Usage:
        ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._resident, self._read = _status("VmRSS"), _characters()
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.read = _characters() - self._read
        self.cpu = time.process_time() - self._cpu
        dist.barrier()
        self.seconds = time.perf_counter() - self._begin
        self.peak = _status("VmHWM") - self._resident


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _characters() -> int:
    """The bytes that this process has asked read() and its like for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def local_bytes(model: Any) -> int:
    """The bytes of the parameters that this rank holds."""
    locals_ = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return sum(local.numel() * local.element_size() for local in locals_)


# ---- two ways --------------------------------------------------------------------------------------------------------


def load_shards(folder: Path, mesh: Any, plan: Any) -> tuple[Any, int]:
    import transformers

    from shardwise import hub

    model, report = hub.load_with_report(transformers.LlamaForCausalLM, folder, mesh, plan)
    return model, report.header_bytes + sum(report.read_bytes.values())


def save_shards(model: Any, folder: Path) -> None:
    from shardwise import hub

    hub.save(model, folder, sync=False)


def load_on_rank_0(folder: Path, mesh: Any, plan: Any) -> tuple[Any, int]:
    import transformers

    from shardwise import shard_parameters
    from shardwise.fsdp import fully_shard
    from shardwise.parallel import parallelize_module

    cls = transformers.LlamaForCausalLM
    if dist.get_rank() == 0:
        model = cls.from_pretrained(folder)
    else:
        with torch.device("meta"):
            model = cls(transformers.LlamaConfig.from_pretrained(folder))
        model = model.to_empty(device="cpu")
    if plan == "fully_sharded":
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), 0
    if callable(plan):
        return shard_parameters(model, mesh, plan), 0
    parallelize_module(model, mesh, model.tp_plan)
    for parameter in model.parameters():
        if not hasattr(parameter, "_local_tensor"):
            dist.broadcast(parameter.data, 0)
    return model, 0


def save_on_rank_0(model: Any, folder: Path) -> None:
    full = {}
    for key, tensor in model.state_dict().items():
        gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if dist.get_rank() == 0:
            full[key] = gathered
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=full)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "shards": (load_shards, save_shards),
    "rank 0": (load_on_rank_0, save_on_rank_0),
}


class Row(NamedTuple):
    """What one rank has measured in one repeat."""

    local_bytes: int
    counted: int
    read: int
    load: tuple[int, float, float]
    """Peak, seconds, CPU seconds."""
    save: tuple[int, float, float]


def run(folder: str, way: str, plan: str) -> list[list[Row]]:
    """The rows of each rank, one for each repeat."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load, save = WAYS[way]
    rows = []
    for source in ("small", *["model"] * REPEATS):  # the first time imports modules and makes groups
        mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        with Usage() as loading:
            model, counted = load(Path(folder) / source, mesh, PLANS[plan])
        with Usage() as saving:
            save(model, Path(folder) / f"{way} {plan}")
        costs = [(usage.peak, usage.seconds, usage.cpu) for usage in (loading, saving)]
        rows.append(Row(local_bytes(model), counted, loading.read, *costs))
        del model
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, rows[1:])
    return every


# ---- report ----------------------------------------------------------------------------------------------------------


def cost_of(rows: list[list[Row]], task: str) -> tuple[float, float, float]:
    """MiB of the rank with most, seconds, and CPU seconds of all ranks: the least of the repeats."""
    repeats = [[getattr(row, task) for row in ranks] for ranks in zip(*rows, strict=True)]
    peak = max(cost[0] for costs in repeats for cost in costs) / 2**20
    return peak, min(costs[0][1] for costs in repeats), min(sum(cost[2] for cost in costs) for costs in repeats)


def make(folder: Path, sizes: dict[str, int]) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**sizes, **HEADS, max_position_embeddings=512)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report("hub")
    reads, costs = [], []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "small", SMALL)
        make(Path(folder) / "model", SMALL if "--small" in sys.argv else SIZES)
        total = (Path(folder) / "model" / "model.safetensors").stat().st_size
        for plan in PLANS:
            rows = {way: on_processes(run, RANKS, folder, way, plan) for way in WAYS}
            identical = [(Path(folder) / at / "model.safetensors").read_bytes() for at in (f"shards {plan}", "model")]
            assert identical[0] == identical[1], "what was saved is what was loaded"
            most = max((rank[0] for rank in rows["shards"]), key=lambda row: row.counted / row.local_bytes)
            size = most.local_bytes
            reads.append([plan, f"{size / 2**20:.1f}", f"{most.counted / size:.4f}", f"{most.read / size:.4f}"])
            for task in ("load", "save"):
                one, other = (cost_of(rows[way], task) for way in WAYS)
                pairs = zip((".0f", ".2f", ".2f"), one, other, strict=True)
                cells = [f"{value:{form}}" for form, *values in pairs for value in values]
                costs.append([f"{task}, {plan}", *cells, f"{one[1] / other[1]:.2f}"])
    report.add(f"A model of {total / 2**20:.0f} MiB on {RANKS} gloo processes; `sync=False`, files in the page cache.")
    header = ["", "shards of a rank, MiB", "read / shards", "asked of the system / shards"]
    report.table("Bytes that a rank reads, headers included (the rank with most)", header, reads)
    header = ["", "peak MiB", "rank 0: peak MiB", "s", "rank 0: s", "CPU s", "rank 0: CPU s", "ratio of s"]
    report.table("Memory (of the rank with most) and time, beside gathering on rank 0", header, costs)
    report.save()


if __name__ == "__main__":
    sys.exit(main())
