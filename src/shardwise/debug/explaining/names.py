"""The user's name of a tensor: the path of a parameter, or a variable of the running function."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...sharding.source_lines import Line
from ..module_calls import ModuleCalls
from .lines import line_now, users_frame_now


class Names:
    """Finds the names of tensors."""

    def __init__(self, calls: ModuleCalls) -> None:
        self._calls = calls
        self._leaves: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each leaf, the variable and the line through which a forward pass last read it."""

    def note_leaf(self, leaf: Tensor) -> None:
        """Record where a leaf is read."""
        line = line_now()
        if line is not None and self._leaves.get(leaf, (None, None))[1] != line:
            self._leaves[leaf] = self.variable(leaf), line

    def line_of_leaf(self, leaf: Tensor) -> Line | None:
        """Return the line that last read a leaf in a forward pass; None if none did."""
        return self._leaves.get(leaf, (None, None))[1]

    def of_leaf(self, leaf: Tensor, otherwise: str) -> str:
        """Return the name of a leaf in a backward pass: its path as a parameter, or the variable that last held it."""
        return self.parameter(leaf) or self._leaves.get(leaf, (None, None))[0] or otherwise

    def parameter(self, tensor: Tensor) -> str | None:
        """Return the path of a parameter of a called module; None for other tensors."""
        return self._calls.parameter_name(tensor)

    def variable(self, tensor: Tensor) -> str | None:
        """Return the variable of the user's running function that holds a tensor, or its base; None without one."""
        frame = users_frame_now()
        if frame is None:
            return None
        values = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
        values |= frame.f_locals
        wanted = (tensor,) if tensor._base is None else (tensor, tensor._base)
        return next((name for each in wanted for name, value in values.items() if value is each), None)

    def of(self, tensor: Tensor, otherwise: str) -> str:
        """Return the name to use in a sentence: the user's, or `otherwise`, the op's own name for its operand."""
        base = tensor._base if isinstance(tensor._base, Tensor) else tensor
        return self.parameter(tensor) or self.parameter(base) or self.variable(tensor) or otherwise
