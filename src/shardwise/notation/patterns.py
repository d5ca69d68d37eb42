"""How a rule writes the dims of a tensor: one word for each dim.

    m k          two dims; all dims named `m` have the same index space, which is called a factor
    (a b)        one dim made of two factors, major to minor
    [d]          a factor that must be replicated: no mesh axis may shard it
    b..          any number of dims, with factors b0, b1, ...; the same number wherever `b..` is written
    m?           may broadcast: its size may be 1, or the dim missing on the left; `b?..` for any number of such dims
    _   _..      a dim without a factor, which is never sharded; any number of such dims
    1            a dim of size 1
    {x..}        the argument is a list of tensors, each with this pattern

>>> scanner = Scanner("b.. (g [r]), {m? _}")
>>> [str(pattern) for pattern in scanner.patterns()]
['b.. (g [r])', '{m? _}']
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from ..errors import ShardwiseError

TOKEN = re.compile(
    r"(?P<arrow>->)|(?P<dots>\.\.)|(?P<name>[A-Za-z]\w*)|(?P<number>\d+(?!\w))|(?P<mark>[()\[\]{},;=|+?]|_(?!\w))"
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
WORDS = {"arrow": "'->'", "name": "a name", "number": "a number"}


class RuleError(ShardwiseError, ValueError):
    """An invalid rule. `position` is the index of the mistake in its text.

    >>> parse("m k, k n > m n")
    Traceback (most recent call last):
    ...
    shardwise.notation.patterns.RuleError: unexpected character '>', at position 9 of the rule 'm k, k n > m n': ...
    """

    def __init__(self, problem: str, fix: str = "", position: int | None = None) -> None:
        super().__init__(problem, fix)
        self.position = position


class Atom(NamedTuple):
    """One name in a pattern with its marks. The name `_` is a dim without a factor."""

    name: str
    replicated: bool = False
    broadcast: bool = False
    many: bool = False

    def __str__(self) -> str:
        text = self.name + "?" * self.broadcast + ".." * self.many
        return f"[{text}]" if self.replicated else text


Dim = tuple[Atom, ...]
"""The atoms of one dim, major to minor: several for a compound dim, none for a dim of size 1."""

NO_FACTOR = Atom("_")


class Pattern(NamedTuple):
    """The dims of one tensor, or of every tensor of a list."""

    dims: tuple[Dim, ...]
    listed: bool = False

    def __str__(self) -> str:
        text = " ".join(map(dim_text, self.dims))
        return f"{{{text}}}" if self.listed else text


def dim_text(dim: Dim) -> str:
    """Return the text of a dim."""
    if len(dim) == 1:
        return str(dim[0])
    return f"({' '.join(map(str, dim))})" if dim else "1"


class Token(NamedTuple):
    """A token of a rule, with its position in the text."""

    kind: str
    text: str
    position: int


class Occurrence(NamedTuple):
    """An atom, the index of its tensor (inputs first, then outputs), and its position in the text."""

    atom: Atom
    tensor: int
    position: int


class Scanner:
    """Reads a rule token by token, and records the position of each atom for the checks that follow."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.occurrences: list[Occurrence] = []
        self.tensors = 0
        self._tokens: list[Token] = []
        self._next = 0
        position = 0
        while position < len(text):
            if text[position].isspace():
                position += 1
                continue
            match = TOKEN.match(text, position)
            if match is None:
                self.fail(f"unexpected character {text[position]!r}", "start names with a letter", position)
            self._tokens.append(Token(match.lastgroup or "", match.group(), position))
            position = match.end()
        self._tokens.append(Token("end", "", len(text)))

    def fail(self, reason: str, fix: str, position: int | None = None) -> NoReturn:
        """Raise a `RuleError` that says what is wrong, where, and what to write instead."""
        where = self.peek.position if position is None else position
        raise RuleError(f"{reason}, at position {where} of the rule {self.text!r}", fix, where)

    @property
    def peek(self) -> Token:
        """The next token, which is not consumed."""
        return self._tokens[self._next]

    def take(self, *texts: str) -> Token | None:
        """Consume and return the next token if it has one of these texts or kinds; else return None."""
        token = self._tokens[self._next]
        if token.text not in texts and token.kind not in texts:
            return None
        self._next += token.kind != "end"
        return token

    def expect(self, wanted: str, fix: str) -> Token:
        """Consume and return the next token, which must have this text or kind."""
        token = self.take(wanted)
        if token is None:
            found = repr(self.peek.text) if self.peek.text else "the end"
            self.fail(f"expected {WORDS.get(wanted, repr(wanted))}, found {found}", fix)
        return token

    # ---- tensors ------------------------------------------------------------------------------------------------

    def patterns(self) -> tuple[Pattern, ...]:
        """Read patterns separated by commas; an empty text is one pattern without dims."""
        found = [self.pattern()]
        while self.take(","):
            found.append(self.pattern())
        return tuple(found)

    def pattern(self) -> Pattern:
        """Read the pattern of one tensor, or of a list of tensors in braces."""
        opening = self.take("{")
        dims = []
        while self.peek.kind in ("name", "number") or self.peek.text in ("(", "[", "_"):
            dims.append(self.dim())
        if opening:
            self.close(opening)
        self.tensors += 1
        return Pattern(tuple(dims), opening is not None)

    def close(self, opening: Token) -> None:
        """Consume the bracket that closes this one."""
        if not self.take(CLOSING[opening.text]):
            fix = f"add {CLOSING[opening.text]!r} after the last name"
            self.fail(f"{opening.text!r} is not closed", fix, opening.position)

    def dim(self) -> Dim:
        """Read one dim: an atom, a compound, or 1."""
        opening = self.take("(")
        if opening:
            atoms = []
            while self.peek.kind == "name" or self.peek.text == "[":
                position = self.peek.position
                atoms.append(self.atom())
                if atoms[-1].broadcast:
                    fix = "leave the ? out: only a dim with a single factor may broadcast"
                    self.fail(f"{atoms[-1]} broadcasts inside a compound dim", fix, position)
            self.close(opening)
            return tuple(atoms)
        number = self.take("number")
        if number is None:
            return (self.atom(),)
        if number.text != "1":
            self.fail(f"a dim of size {number.text}", "give the dim a name; 1 is the only number", number.position)
        return ()

    def atom(self) -> Atom:
        """Read a name with its marks, in brackets if the factor must be replicated."""
        opening = self.take("[")
        name = self.take("_") or self.expect("name", "write one name, as in d, [d] or [n..]")
        broadcast = self.take("?") is not None
        atom = Atom(name.text, opening is not None, broadcast, self.take("..") is not None)
        if opening:
            self.close(opening)
        if atom.name == "_" and (atom.replicated or atom.broadcast):
            self.fail(f"{atom} marks a dim without a factor", "write _ or _..", name.position)
        self.occurrences.append(Occurrence(atom, self.tensors, name.position))
        return atom
