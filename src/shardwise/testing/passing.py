"""Try to refute that operands may stay Partial, as a `linear`, `monotone` or `antitone` clause claims, on random data.

>>> refuted([ProbeCall(call)], "linear 0 | 1")          # of aten::mul
''
>>> refuted([ProbeCall(call)], "linear 0")              # of aten::relu
'it is not linear 0'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..notation import parse
from ..notation.clauses import PASSING
from .combine import same_results
from .probe_call import ProbeCall, variants

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": torch.add,
    "monotone": torch.maximum,
    "antitone": torch.maximum,
}


def refuted(setups: Sequence[ProbeCall], clauses: str, seed: int = 0) -> str:
    """Return the first clause that some sample refutes, as a sentence; "" if none is refuted."""
    operands = ", ".join(["_.."] * len(setups[0].names))
    rule = parse(f"{operands} -> _.. ; {clauses}")
    for word in PASSING:
        for members in getattr(rule, word):
            for setup in setups:
                if not all(_passes(data, word, members, seed) for data in variants(setup, seed)):
                    return f"it is not {word} {'+'.join(map(str, members))}"
    return ""


def _passes(setup: ProbeCall, word: str, members: Sequence[int], seed: int) -> bool:
    """Return whether combining two operands and then calling the op equals combining the two results."""
    generator = torch.Generator().manual_seed(seed)

    def random_like(tensor: Tensor) -> Tensor:
        wide = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 3
        return wide.round().to(tensor.dtype) if tensor.numel() % 2 else wide.to(tensor.dtype)

    others = {id(t): random_like(t) for member in members for t in setup.tensors(member)}
    second = setup.replaced(lambda operand, t: others.get(id(t), t))
    both = setup.replaced(lambda operand, t: COMBINE[word](t, others[id(t)]) if id(t) in others else t)
    runs = [one.run() for one in (setup, second, both)]
    if any(run is None for run in runs):
        return True  # the op does not accept this data
    first, other, of_both = (run for run in runs if run is not None)
    combine = torch.minimum if word == "antitone" else COMBINE[word]
    combined = [[combine(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(first, other, strict=True)]
    return all(same_results(x, y) for x, y in zip(combined, of_both, strict=True))
