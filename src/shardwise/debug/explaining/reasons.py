"""The sentences that explain communication, and the edits that avoid it, as text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..._torch.ops import OpOverload
from ...comm.plan import bytes_text
from ...dispatch.choices import OperandMove
from ...dispatch.gather_cache import is_weight
from .names import Names
from .purposes import Purpose
from .records import CAUSES, Choice, Communication

_OPEN = {"sum": "the sum", "avg": "the average", "product": "the product", "max": "the maximum", "min": "the minimum"}


def of_operand(sent: Communication, op: str, move: OperandMove, operand: str) -> str:
    """Return why an operand is moved, and what moving others would have cost."""
    needs = [
        f"{_OPEN[what]} of {operand} over {axis}" if what in _OPEN else f"{what} unsharded on {axis}"
        for axis, what in move.lost
    ]
    sentence = f"{_short(op)} needs {' and '.join(needs) or f'{operand} as {move.after!r}'}"
    chosen = sent.chosen
    if chosen is not None:
        sentence += f"; {_moving(chosen)} costs {bytes_text(chosen.bytes)}"
        others = {_moving(choice): choice.bytes for choice in reversed(sent.rejected) if choice.moves}
        others.pop(_moving(chosen), None)
        cheapest = list(reversed(others.items()))[:2]
        sentence += "".join(f", {moving} {bytes_text(received)}" for moving, received in cheapest)
    return sentence


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default").lstrip("_")


def _moving(choice: Choice) -> str:
    return "moving " + " and ".join(move.operand for move in choice.moves)


def of_kernel(sent: Communication, op: str) -> str:
    """Return why an op communicates while it computes."""
    sharded = (
        [what.removeprefix("shards ") for axis, what in sent.chosen.axes if axis in sent.over] if sent.chosen else []
    )
    along = f" along {' and '.join(sharded)}, which {sent.group} shards," if sharded else ""
    return f"{_short(op)}{along} exchanges data between the ranks of {sent.group}"


def of_gathering(sent: Communication, op: str, operand: str | None) -> str:
    """Return why an op gathers its inputs."""
    return f"{op} has no rule for this call, so {operand or 'its input'} is gathered and every rank computes all of it"


def of_result(sent: Communication, op: str) -> str:
    """Return why the result of an op is moved."""
    return f"the result of {op} is written into a tensor of another layout: {sent.before} -> {sent.after}"


def of_purpose(sent: Communication, purpose: Purpose, leaves: Sequence[str]) -> tuple[str, str | None]:
    """Return why a function of shardwise, or the program itself, communicates, and the edit that avoids it."""
    move = f": {sent.before} -> {sent.after}" if sent.before else ""
    match purpose.cause:
        case "redistribute":
            return f"redistribute was called{move}", _cheaper_reduction(sent)
        case "full_tensor":
            return f"full_tensor was called{move}", "x.to_local()  # if the local shard will do"
        case "conversion":
            return f"{purpose.detail} {sent.module}{move}", _other_layouts(purpose)
        case "gradient":
            through = f" {purpose.detail}" if purpose.detail else ""
            return f"the gradient goes back through{through or ' a redistribution'}{move}", None
        case "leaf gradient":
            what = leaves[0] if leaves else "a leaf"
            return f"the gradient of {what} is redistributed to the placements of {what}{move}", _ACCUMULATE
        case "gradient bucket":
            return f"{len(leaves)} gradients are reduced together: {', '.join(leaves)}", _ACCUMULATE
        case "gather parameters":
            again = sent.backward and not sent.recomputing
            edit = "fully_shard(module, reshard_after_forward=False)  # keeps the parameters until backward"
            return f"fully_shard gathers the parameters of {purpose.detail}", edit if again else None
        case "reduce gradients":
            return f"fully_shard reduces the gradients of {purpose.detail}", (
                "module.set_requires_gradient_sync(False)  # in all micro-batches but the last"
            )
        case "experts":
            return f"rows travel {'back ' if sent.backward else ''}between tokens and experts over {sent.group}", None
        case "distribute" if not purpose.detail:
            return f"{CAUSES['distribute']}, so that all have the same", (
                "distribute_tensor(x, mesh, placements, src_data_rank=None)  # if all ranks have the data already"
            )
        case "erased step":
            return "a recording of an erased step runs it; to see the reason, explain the step without erase", None
        case "program":
            return f"the program calls {sent.collective} itself", None
    detail = f" ({purpose.detail})" if purpose.detail else ""
    return CAUSES[purpose.cause] + detail + move, None


_ACCUMULATE = "with shardwise.accumulate_gradients():  # around all micro-batches but the last"


def _cheaper_reduction(sent: Communication) -> str | None:
    if sent.kind == "all-reduce":
        return "x.redistribute(placements=[Shard(0)])  # a reduce-scatter: half of the bytes, if what follows allows it"
    return None


def _other_layouts(purpose: Purpose) -> str | None:
    if not purpose.detail.startswith("a style"):
        return None
    return "give the style the layouts that the tensor has: input_layouts=, output_layouts=, use_local_output=False"


def edit_of_operand(tensor: Tensor, name: str, placements: str, func: OpOverload, names: Names) -> str:
    """Return the statement that gives an operand the placements with which its op is local."""
    parameter = names.parameter(tensor)
    if parameter is not None:
        own = parameter.rpartition(".")[2]
        return f"{own} = distribute_tensor({own}, mesh, {placements})  # where {parameter} is made"
    called = names.variable(tensor)
    if called is None:
        return f"{name}.redistribute(placements={placements})  # {name}: the operand of {_short(str(func))}"
    if is_weight(tensor):
        return f"{called} = distribute_tensor({called}, mesh, {placements})  # where it is made"
    return f"{called} = {called}.redistribute(placements={placements})  # once, for all that read it"
