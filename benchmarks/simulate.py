"""What simulated ranks cost: the time of ops and redistributions with all ranks in this process."""

from __future__ import annotations

import warnings

import torch
from report import Report, microseconds

from shardwise import Partial, RankTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate


def report_ops(report: Report) -> None:
    plain = torch.zeros(16, 16)
    rows = []
    for ranks in (8, 64, 512):
        local = RankTensor([torch.zeros(16, 16) for _ in range(ranks)])
        with simulate(ranks):
            alone, add, matmul = microseconds(
                lambda: [plain + 1 for _ in range(ranks)],  # noqa: B023
                lambda: local + 1,  # noqa: B023
                lambda: local @ local,  # noqa: B023
                number=max(1, 800 // ranks),
                repeats=20,
            )
        rows.append([str(ranks), f"{add:.0f}", f"{add / ranks:.1f}", f"{alone:.0f}", f"{matmul:.0f}"])
    header = ["ranks", "add us", "per rank", "plain loop us", "matmul us"]
    report.table("One op on the local tensors of all ranks, 16x16 each", header, rows)


def report_redistribute(report: Report) -> None:
    moves = {
        "Shard(0) -> Replicate": ([Shard(0)], [Replicate()]),
        "Replicate -> Shard(0)": ([Replicate()], [Shard(0)]),
        "Shard(0) -> Shard(1)": ([Shard(0)], [Shard(1)]),
        "Partial -> Replicate": ([Partial()], [Replicate()]),
        "Partial -> Shard(0)": ([Partial()], [Shard(0)]),
    }
    sizes = (8, 64)
    times = {}
    for ranks in sizes:
        with simulate(ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            calls = []
            for source, target in moves.values():
                tensor = distribute_tensor(torch.zeros(64, 64), mesh, source)
                calls.append(lambda x=tensor, to=target: x.redistribute(placements=to))
            times[ranks] = microseconds(*calls, number=max(1, 400 // ranks), repeats=20)
    rows = [[name, *(f"{times[ranks][i]:.0f}" for ranks in sizes)] for i, name in enumerate(moves)]
    report.table("A repeated redistribution of a 64x64 tensor, us", ["", *(f"{n} ranks" for n in sizes)], rows)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("simulate")
    report_ops(report)
    report_redistribute(report)
    report.save()


if __name__ == "__main__":
    main()
