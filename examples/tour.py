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
    """Compare a distributed result with the same computation on one device, and print the outcome."""
    global failures
    gathered = ours.full_tensor() if isinstance(ours, DTensor) else ours
    difference = (gathered - one_device).abs().max().item() if one_device.numel() else 0.0
    equal = difference <= 1e-6 * one_device.abs().max().item()
    failures += not equal
    verdict = paint("yes", "32") if equal else paint("NO", "1;31")
    show(f"{what} equal to one device: {verdict} (max difference {difference:g})")


def move(x: DTensor, placements: P) -> DTensor:
    """Redistribute a tensor, and print the plan."""
    y = x.redistribute(placements=placements)
    show(plan(x.spec, y.spec))
    return y


def tour() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    data = torch.randn(16, 32)

    title("1. A tensor on a 2x4 mesh: rows sharded over dp, columns over tp. Each cell shows the rank that holds it.")
    x = distribute_tensor(data, mesh, P("dp", "tp"))
    show(draw(x))
    show(f"the local shard of rank 5 has shape {list(x.shards[5].shape)}; the global shape of x is {list(x.shape)}")
    check("the gathered tensor is", x, data)

    title("2. Redistributed five times. Each plan lists the collectives and the bytes that a rank receives.")
    y = x
    for placements in (P(None, ("dp", "tp")), P(("tp", "dp")), P("tp", "dp"), P("dp"), P()):
        y = move(y, placements)
    check("the redistributed tensor is", y, data)

    title("3. Partial: each rank holds one summand of a sum over dp. The sum is computed when its value is needed.")
    p = DTensor.from_local(torch.ones(8, 4), mesh, [Partial(), Replicate()])
    show(draw(p))
    reduced = move(p, P(("dp", "tp")))
    check("the sum over dp is", reduced, torch.full((8, 4), 2.0))

    title("4. Uneven shards: 10 rows over 8 ranks, sharded as torch.chunk does.")
    odd = torch.arange(10.0)
    z = distribute_tensor(odd, mesh, P(("dp", "tp")))
    show(draw(z))
    check("the redistributed uneven tensor is", move(z, P("tp")), odd)

    title("5. Interleaved shards: a fused [q; k; v] weight, each third sharded over tp.")
    fused = torch.arange(24.0)
    qkv = distribute_tensor(fused, mesh, [Replicate(), InterleavedShard(0, 3)])
    show(draw(qkv))
    check("the redistributed interleaved tensor is", move(qkv, P("tp")), fused)

    title("6. Gradients: a leaf's gradient has the placements of the leaf.")
    weight = data.clone().requires_grad_()
    (weight * weight).sum().backward()
    w = distribute_tensor(data, mesh, P("dp", "tp")).requires_grad_()
    gathered = w.redistribute(placements=P(None, ("tp", "dp"))).full_tensor()
    (gathered * gathered).sum().backward()
    show(f"w is {w.spec}, its gradient is {w.grad.spec}")
    check("the gradient is", w.grad, weight.grad)

    title("7. Random numbers do not depend on the sharding.")
    torch.manual_seed(1)
    a = randn(16, 32, device_mesh=mesh, placements=P("dp", "tp"))
    with simulate(1):
        torch.manual_seed(1)
        alone = randn(16, 32, device_mesh=init_device_mesh("cpu", (1,)), placements=[Replicate()]).shards[0]
    check("randn over 8 ranks is", a, alone)

    title("8. Checkpoints: saved on this mesh, loaded on another.")
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"x": x}, checkpoint_id=folder, no_dist=True)
        other = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
        loaded = {"x": zeros(16, 32, device_mesh=other, placements=[Shard(1)])}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    show(f"saved as {x.spec}, loaded as {loaded['x'].spec}")
    check("the loaded tensor is", loaded["x"], data)


def main() -> None:
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    print(paint("shardwise: a tour of distributed tensors on 8 simulated ranks, in this process", "1"))
    with simulate(8):
        tour()
    print()
    if failures:
        sys.exit(f"{failures} results differ from one device")
    print(paint("Everything above equals the same computation on one device.", "1;32"))


if __name__ == "__main__":
    main()
