"""Checks of a rule after it was read: each raises a `RuleError` with the position of the mistake."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .clauses import Clauses
from .patterns import Atom, Occurrence, Scanner


def check_factors(scanner: Scanner, seen: Sequence[Occurrence], inputs: int) -> None:
    """Raise unless each factor is written alike everywhere, and at most once in a tensor."""
    first: dict[str, Atom] = {}
    in_tensor: set[tuple[int, str]] = set()
    for atom, tensor, position in seen:
        if atom.broadcast and tensor >= inputs:
            scanner.fail(f"{atom} in an output", "leave the ? out: only operands broadcast", position)
        known = first.setdefault(atom.name, atom)
        if atom.name == "_":
            if atom.many and (tensor, "_..") in in_tensor:
                scanner.fail("a second _.. in one tensor", "write one _.. for all remaining dims", position)
            in_tensor.add((tensor, str(atom)))
            continue
        if atom.replicated != known.replicated:
            fix = f"write [{atom.name}] everywhere"
            scanner.fail(f"{atom.name} must be replicated in one place and not in another", fix, position)
        if atom.many != known.many:
            scanner.fail(f"{atom.name} is one dim in one place and an ellipsis in another", "use two names", position)
        if (tensor, atom.name) in in_tensor and not atom.replicated:
            fix = f"write [{atom.name}]: a diagonal cannot be sharded"
            scanner.fail(f"{atom.name} twice in one tensor", fix, position)
        in_tensor.add((tensor, atom.name))
    for atom, _, position in seen:
        stem = re.sub(r"\d+$", "", atom.name)
        if stem != atom.name and stem in first and first[stem].many:
            scanner.fail(f"{atom.name} is also a dim of {stem}..", "use another name", position)


def check_clause_names(
    scanner: Scanner, clauses: Clauses, seen: Sequence[Occurrence], named: Sequence[Occurrence]
) -> None:
    """Raise unless clauses name factors of the tensors, written as in the tensors."""
    factors = {atom.name: atom for atom, _, _ in seen}
    for atom, _, position in named:
        if atom.name == "_" or atom.name not in factors:
            scanner.fail(f"no tensor has the factor {atom.name}", "name a factor of the tensors", position)
        if atom.many != factors[atom.name].many:
            fix = f"write {factors[atom.name]._replace(replicated=False, broadcast=False)}"
            scanner.fail(f"{atom} is written differently in the tensors", fix, position)
    for name in clauses.kernel:
        if factors[name].replicated:
            fix = "leave the brackets out: a kernel lets it be sharded"
            scanner.fail(f"{name} must be replicated and has a kernel", fix, clauses.positions["kernel"])
    for name in clauses.sizes:
        if name not in factors or factors[name].many:
            scanner.fail(f"{name} is not a factor", f"write {name}=(dims) for a size argument", clauses.positions[name])
    for name in clauses.size_arguments:
        if name in factors:
            fix = "rename the factor: sizes are given by name"
            scanner.fail(f"{name} is an argument and a factor", fix, clauses.positions[name])


def check_outputs(scanner: Scanner, seen: Sequence[Occurrence], named: Sequence[Occurrence], inputs: int) -> None:
    """Raise if a factor that only outputs have is neither replicated nor named in a clause: its size is unknown."""
    known = {atom.name for atom, tensor, _ in seen if tensor < inputs} | {atom.name for atom, _, _ in named}
    for atom, _, position in seen:
        if atom.name != "_" and atom.name not in known and not atom.replicated:
            fix = f"write [{atom.name}], name it in a size argument, or give it a kernel"
            scanner.fail(f"only an output has the factor {atom.name}", fix, position)
