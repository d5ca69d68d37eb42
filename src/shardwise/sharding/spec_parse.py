"""Read a spec from the text that it prints as, such as `f32[8@dp, 16@tp] sum(pp)`.

    spec    dtype [ dims ] reductions        f32[8, 16@tp] sum(dp)
    dim     size, size@axes, (dim dim ...)   8    8@tp    8@(dp, tp)    (3 8@tp)
    axes    name, or (name, name ...)        major to minor
    reduction   op(axis)                     sum, avg, min, max, product

>>> parse_spec("f32[8@dp, 16]", mesh)
f32[8@dp, 16]
>>> parse_spec("f32[8@dq, 16]", mesh)
Traceback (most recent call last):
...
shardwise.errors.PlacementError: no axis dq in mesh(dp=2, tp=4)
    f32[8@dq, 16]
          ^^: its axes are dp, tp
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlacementError
from .layout import Dim, Factor, Layout
from .mesh import MeshInfo, mesh_info_of
from .placement import REDUCE_OPS
from .spec import DTensorSpec, contiguous_meta
from .spec_text import DTYPE_NAMES

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\d+|.)", re.DOTALL)
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def parse_spec(text: str, mesh: DeviceMesh) -> DTensorSpec:
    """Return the spec that prints as this text, on this mesh. An error shows the position of the mistake."""
    mesh_info = mesh_info_of(mesh)
    layout, dtype = _Parser(text, mesh_info).spec()
    return DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(torch.Size(layout.shape), dtype))


class _Token(NamedTuple):
    text: str
    start: int


class _Parser:
    """Reads a spec token by token."""

    def __init__(self, text: str, mesh_info: MeshInfo) -> None:
        self.text, self.mesh_info = text, mesh_info
        found = _TOKEN.finditer(text.rstrip())
        self.tokens = [_Token(match[1], match.start(1)) for match in found]
        self.next = 0
        self.used: set[int] = set()

    def spec(self) -> tuple[Layout, torch.dtype]:
        """Return the layout and dtype of the text."""
        dtype = self._dtype()
        self._expect("[", "the sizes of the dims follow the dtype: f32[8, 16]")
        dims: list[Dim] = []
        while not self._accept("]"):
            if dims:
                self._expect(",", "dims are separated by commas, and end with ]")
            dims.append(self._dim())
        partial = []
        while self._peek() is not None:
            partial.append(self._reduction())
        return Layout.make(self.mesh_info.sizes, dims, tuple(partial)), dtype

    def _dtype(self) -> torch.dtype:
        token = self._take("a dtype", "write a spec as it is printed: f32[8@dp, 16]")
        dtype = _DTYPES.get(token.text) or getattr(torch, token.text, None)
        if not isinstance(dtype, torch.dtype):
            self._fail(f"no dtype {token.text}", f"dtypes are {', '.join(_DTYPES)}", token)
        return dtype

    def _dim(self) -> Dim:
        if not self._accept("("):
            return (self._factor(),)
        factors: list[Factor] = []
        while not self._accept(")"):
            factors.append(self._factor())
        return tuple(factors)

    def _factor(self) -> Factor:
        fix = "a dim is a size, or a size and the axes that shard it: 8@tp"
        token = self._take("a size", fix)
        if not token.text.isdigit():
            self._fail(f"{token.text!r} is no size", fix, token)
        return Factor(int(token.text), self._axes() if self._accept("@") else ())

    def _axes(self) -> tuple[int, ...]:
        if not self._accept("("):
            return (self._axis(),)
        axes = [self._axis()]
        while not self._accept(")"):
            self._expect(",", "several axes are written (dp, tp)")
            axes.append(self._axis())
        return tuple(axes)

    def _axis(self) -> int:
        names = self.mesh_info.names
        token = self._take("an axis", f"the axes are {', '.join(names)}")
        if token.text not in names:
            self._fail(f"no axis {token.text} in {self.mesh_info!r}", f"its axes are {', '.join(names)}", token)
        axis = names.index(token.text)
        if axis in self.used:
            self._fail(f"axis {token.text} is used twice", "an axis shards one dim, or is reduced over", token)
        self.used.add(axis)
        return axis

    def _reduction(self) -> tuple[int, str]:
        token = self._take("a reduction", "")
        if token.text not in REDUCE_OPS:
            self._fail(f"no reduction {token.text!r}", f"after ] come reductions: {', '.join(REDUCE_OPS)}", token)
        self._expect("(", f"write {token.text}(axis)")
        axis = self._axis()
        self._expect(")", f"write {token.text}(axis)")
        return axis, token.text

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _peek(self) -> _Token | None:
        return self.tokens[self.next] if self.next < len(self.tokens) else None

    def _take(self, what: str, fix: str) -> _Token:
        token = self._peek()
        if token is None:
            self._fail(f"{what} is missing", fix, _Token(" ", len(self.text.rstrip())))
        self.next += 1
        return token

    def _accept(self, text: str) -> bool:
        token = self._peek()
        found = token is not None and token.text == text
        self.next += found
        return found

    def _expect(self, text: str, fix: str) -> None:
        token = self._take(repr(text), fix)
        if token.text != text:
            self._fail(f"{token.text!r} where {text!r} is expected", fix, token)

    def _fail(self, problem: str, fix: str, token: _Token) -> NoReturn:
        shown = f"\n    {self.text}\n    {' ' * token.start}{'^' * len(token.text)}"
        raise PlacementError(f"{problem} at position {token.start} of the spec{shown}\n{fix}")
