"""A tour of shardwise on 8 simulated ranks: no GPU, no launcher. Run it with `python examples/tour.py`."""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

from shardwise import (
    DTensor,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    plan,
    randn,
    simulate,
    zeros,
)
from shardwise.debug import draw

COLOUR = sys.stdout.isatty()
failures = 0


def paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLOUR else text


def title(text: str) -> None:
    print("\n" + paint(text, "1;36"))


def show(text: object) -> None:
    print("\n".join("  " + line for line in str(text).splitlines()))


def check(what: str, ours: torch.Tensor, one_device: torch.Tensor) -> None:
    """Compare a distributed result with the same computation on one device."""
    global failures
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    difference = (whole - one_device).abs().max().item() if one_device.numel() else 0.0
    equal = difference <= 1e-6 * one_device.abs().max().item()
    failures += not equal
    verdict = paint("yes", "32") if equal else paint("NO", "1;31")
    show(f"{what} equal to one device: {verdict} (max difference {difference:g})")


def move(x: DTensor, placements: P) -> DTensor:
    """Redistribute, and show the plan that does it."""
    y = x.redistribute(placements=placements)
    show(plan(x.spec, y.spec))
    return y


def tour() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    data = torch.randn(16, 32)

    title("1. A tensor cut over a 2x4 mesh: rows over dp, columns over tp. Each cell shows its rank.")
    x = distribute_tensor(data, mesh, P("dp", "tp"))
    show(draw(x))
    show(f"rank 5 holds a {list(x.shards[5].shape)} tensor; x itself is still {list(x.shape)}")
    check("the whole tensor", x, data)

    title("2. Moved through other placements. Each plan says what is sent, and how much.")
    y = x
    for placements in (P(None, ("dp", "tp")), P(("tp", "dp")), P("tp", "dp"), P("dp"), P()):
        y = move(y, placements)
    check("after five moves", y, data)

    title("3. Partial: each dp group holds summands. They are reduced when a value is needed.")
    p = DTensor.from_local(torch.ones(8, 4), mesh, [Partial(), Replicate()])
    show(draw(p))
    reduced = move(p, P(("dp", "tp")))
    check("the sum over dp", reduced, torch.full((8, 4), 2.0))

    title("4. Sizes need not divide: 10 rows over 8 ranks, as torch.chunk cuts them.")
    odd = torch.arange(10.0)
    z = distribute_tensor(odd, mesh, P(("dp", "tp")))
    show(draw(z))
    check("the uneven tensor, moved", move(z, P("tp")), odd)

    title("5. Interleaved: a fused [q; k; v] weight, each third cut over tp.")
    fused = torch.arange(24.0)
    qkv = distribute_tensor(fused, mesh, [Replicate(), InterleavedShard(0, 3)])
    show(draw(qkv))
    check("the interleaved tensor, moved", move(qkv, P("tp")), fused)

    title("6. Gradients go back the way the values came.")
    weight = data.clone().requires_grad_()
    (weight * weight).sum().backward()
    w = distribute_tensor(data, mesh, P("dp", "tp")).requires_grad_()
    whole = w.redistribute(placements=P(None, ("tp", "dp"))).full_tensor()
    (whole * whole).sum().backward()
    show(f"w is {w.spec}, its gradient {w.grad.spec}")
    check("the gradient", w.grad, weight.grad)

    title("7. Random numbers belong to the tensor, not to the ranks.")
    torch.manual_seed(1)
    a = randn(16, 32, device_mesh=mesh, placements=P("dp", "tp"))
    with simulate(1):
        torch.manual_seed(1)
        alone = randn(16, 32, device_mesh=init_device_mesh("cpu", (1,)), placements=[Replicate()]).shards[0]
    check("randn over 8 ranks", a, alone)

    title("8. Saved on this mesh, loaded on another.")
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"x": x}, checkpoint_id=folder, no_dist=True)
        other = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
        loaded = {"x": zeros(16, 32, device_mesh=other, placements=[Shard(1)])}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    show(f"saved as {x.spec}, loaded as {loaded['x'].spec}")
    check("the loaded tensor", loaded["x"], data)


def main() -> None:
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    print(paint("shardwise: one tensor over 8 simulated ranks, in this process", "1"))
    with simulate(8):
        tour()
    print()
    if failures:
        sys.exit(f"{failures} results differ from one device")
    print(paint("Everything above equals the same computation on one device.", "1;32"))


if __name__ == "__main__":
    main()
