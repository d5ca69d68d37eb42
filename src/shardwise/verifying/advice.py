"""Text for a difference: what it usually comes from, and the code that fixes it."""

from __future__ import annotations

from .cause import Cause
from .recording import Key, Recording

_REDUCE = 'torch.distributed.all_reduce({what}, group=mesh.get_group("{axis}"))'


def advice(
    key: Key, cause: Cause, axes: tuple[str, ...], found: Recording, *, common: float | None, before: Key | None
) -> tuple[str, str]:
    """Return why a tensor probably differs, and what to write instead.

    `axes` are those on which the difference depends; `common` is the factor by which all gradients differ, if they do;
    `before` is the tensor that was computed right before.
    """
    over = " and ".join(axes) or "the mesh"
    if key.kind == "initial":
        return _initial(key, cause, over)
    if cause.pattern == "missing":
        return _missing(key)
    if key.kind == "norm" or (key.kind == "value" and "norm" in key.path):
        return _norm(cause, over)
    if key.kind in ("gradient", "clipped gradient", "output gradient"):
        return _gradient(key, cause, axes, over, found, common)
    if key.kind == "parameter":
        return _parameter(cause, over)
    if key.kind == "buffer":
        return (
            f"ranks updated this buffer from what they hold themselves, so replicas drift apart over {over}",
            f"reduce what the update is computed from: {_all_reduce('statistics', axes)}",
        )
    return _forward(key, cause, axes, over, before)


def advice_without_mesh(key: Key, cause: Cause) -> tuple[str, str]:
    """Return the same for a difference that a mesh of one rank has, too."""
    if cause.pattern == "factor" and key.kind == "gradient":
        return (
            "gradients are scaled on ranks in a way that does not depend on the mesh",
            "look at the scale of the loss: is it divided by the number of microbatches, or of tokens, once?",
        )
    if cause.pattern == "missing":
        return _missing(key)
    if key.kind == "parameter":
        return _parameter(cause, "the mesh")
    return (
        "the mesh is not the cause: on ranks the program computes something else than on one device",
        "look at what apply() changes in the model, and at code that runs on ranks only (`if mesh is not None`)",
    )


def _all_reduce(what: str, axes: tuple[str, ...]) -> str:
    return "; ".join(_REDUCE.format(what=what, axis=axis) for axis in axes or ("tp",))


def _initial(key: Key, cause: Cause, over: str) -> tuple[str, str]:
    if cause.pattern == "shape":
        return (
            "the local tensor is not a shard of the parameter",
            "shard with shardwise.distribute_tensor(p, mesh, placements)",
        )
    return (
        f"the parameter does not start from the same values on ranks that differ over {over}",
        "seed all ranks alike before the model is built (torch.manual_seed(seed), without the rank), or broadcast it: "
        f"torch.distributed.broadcast({key.path}, src=0)",
    )


def _missing(key: Key) -> tuple[str, str]:
    return (
        f"`{key.path}` is not used, or what is computed from it is detached, as by a collective without autograd",
        "use collectives that autograd records: DTensor.redistribute, or torch.distributed.nn.functional",
    )


def _norm(cause: Cause, over: str) -> tuple[str, str]:
    if cause.pattern in ("root", "ranks differ", "sum", "average") or cause.factor < 1:
        return (
            f"each rank computes the norm of the gradients that it holds itself, without those of others over {over}",
            "sum the squares over the axes that shard parameters before the square root, or keep gradients DTensors: "
            "torch.nn.utils.clip_grad_norm_ then computes the norm of the global gradients",
        )
    return (
        f"squares of gradients are counted several times: replicated gradients were summed over {over} as if sharded",
        "sum the squares of each parameter over the axes that shard it, and of a replicated one over none; "
        "or keep gradients DTensors: torch.nn.utils.clip_grad_norm_ then counts each element once",
    )


def _gradient(
    key: Key, cause: Cause, axes: tuple[str, ...], over: str, found: Recording, common: float | None
) -> tuple[str, str]:
    tied = next((group for group in found.tied if key.path in group), None)
    name = f"model.{key.path}.grad" if key.kind != "output gradient" else "gradient"
    if cause.pattern in ("sum", "ranks differ") and key.kind != "output gradient":
        return (
            f"the parameter is replicated over {over}, but each rank uses it on other data (a shard of the batch, of "
            "the sequence or of features): without a reduction, replicas get different gradients and drift apart",
            f"reduce it after backward: {_all_reduce(name, axes)}; or make the parameter a DTensor: "
            "distribute_module(module, mesh), SequenceParallel() for a norm",
        )
    if cause.pattern == "average":
        return (
            f"gradients of data-parallel ranks are not averaged over {over}",
            f"average them: {_all_reduce(name, axes)}; {name} /= {_sizes(axes)}",
        )
    if cause.pattern == "factor" and cause.factor > 1:
        return (
            f"this gradient was summed twice over {over}, or it is the same on all ranks and not an operand of a sum",
            f"remove one of the reductions over {over}"
            + (f", or divide the loss by {_sizes(axes)} once" if common is not None else ""),
        )
    if cause.pattern == "factor" and 0 < cause.factor < 1:
        return (
            f"this gradient was divided by the size of {over} once too often, or averaged where it should be summed",
            f"sum instead of averaging over {over}, or divide the loss once less",
        )
    if tied:
        return f"the parameter is tied ({' and '.join(sorted(tied))})", "keep it tied in apply()"
    if cause.pattern == "zeros":
        return "dropout draws another mask", "draw it on a DTensor"
    return (
        "the backward pass of this module, or of what comes after it, is wrong, while the forward pass is right",
        "look for collectives in the forward pass that autograd does not record or whose backward is another one: "
        "an all-reduce of activations passes its gradient on unchanged; an input that is used by all ranks needs "
        f"its gradient reduced over {over}",
    )


def _sizes(axes: tuple[str, ...]) -> str:
    return " / ".join(f'mesh["{axis}"].size()' for axis in axes) or "the size of the axis"


def _parameter(cause: Cause, over: str) -> tuple[str, str]:
    if cause.pattern == "ranks differ":
        return (
            f"gradients agree, but ranks of {over} update the parameter differently",
            "update it from values that are the same on all ranks: no rank-dependent learning rate, noise or condition",
        )
    return (
        "gradients agree, but the update does not: weight decay, learning rate or the update itself is applied in "
        "another way, or twice",
        "run one optimizer step for each parameter: is a parameter in two groups, or does a hook write it as well?",
    )


def _forward(key: Key, cause: Cause, axes: tuple[str, ...], over: str, before: Key | None) -> tuple[str, str]:
    if cause.pattern == "sum":
        return (
            f"ranks of {over} hold operands of a sum (Partial), and the program continues as if each held the sum",
            f"reduce it before it is used: {_all_reduce('x', cause.axes)}; or "
            "x.redistribute(placements=[Replicate()]) before to_local(), and from_local(x, mesh, [Partial()]) for "
            "an operand",
        )
    if cause.pattern == "average":
        return f"each rank of {over} holds its own average", f"average it: {_all_reduce('x', cause.axes)}"
    if cause.pattern == "zeros":
        return (
            f"dropout draws another mask on ranks of {over}: they have different seeds, or draw for their local shard",
            "seed all ranks alike (torch.manual_seed(seed), without the rank), or apply dropout to a DTensor: it draws "
            "by global index",
        )
    if cause.pattern == "factor" and cause.factor > 1:
        return f"this was summed over {over} once too often", f"remove one reduction over {over}"
    if cause.pattern == "factor":
        return f"this was divided by the size of {over} once too often, or is not summed over {over}", (
            f"sum it: {_all_reduce('x', axes)}"
        )
    if key.kind == "loss":
        return (
            f"ranks of {over} compute the loss of other data than they should, or weigh it differently: a mean of "
            "means is no mean where ranks hold different numbers of rows or targets",
            "sum the loss over all ranks and divide by the global count: "
            f"{_all_reduce('total', axes)}; {_all_reduce('count', axes)}; loss = total / count",
        )
    if cause.pattern == "permuted":
        return "elements are sharded or gathered in another order", "use the same layout for sharding and for gathering"
    if cause.pattern == "rows":
        return (
            f"only some rows are wrong: the shards of {over} are uneven, or offset",
            "compute offsets from global indices",
        )
    last = f"the {before.kind} of {before.path or 'the model'}" if before is not None else "what this is computed from"
    return (
        f"{last} is right, so the code in between computes something else on ranks of {over} than on one device: a "
        "missing or repeated collective, a wrong dim, or an index or mask that does not match the local shard",
        "compare the shapes and indices of these lines with those on one device; DTensors do this for you",
    )
