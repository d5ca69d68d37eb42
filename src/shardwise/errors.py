"""The errors shardwise raises, one class for each kind of mistake.

Each also derives from the built-in type that plain PyTorch would raise, so programs that catch `ValueError`
or `RuntimeError` keep working. A message says what was asked, why it is impossible, and what to write instead.

>>> raise PlacementError("Shard(dim=3) on a tensor of 2 dims", "use a dim in [-2, 1]")
Traceback (most recent call last):
...
shardwise.errors.PlacementError: Shard(dim=3) on a tensor of 2 dims: use a dim in [-2, 1]
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """The base class of all errors: `problem` says what is impossible and why, `fix` what to write instead."""

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}: {fix}" if fix else problem)


class PlacementError(ShardwiseError, ValueError):
    """Placements that do not fit the mesh or the tensor."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that is missing, differs from the tensor's mesh, or does not contain the ranks that a call needs."""


class ShapeError(ShardwiseError, ValueError):
    """Local shapes that cannot be shards of one tensor."""


class LayoutError(ShardwiseError, ValueError):
    """A sharding that no layout can express, or a layout that no list of placements can express."""


class InputError(ShardwiseError, TypeError):
    """An argument of the wrong kind."""


class MixedTensorError(ShardwiseError, RuntimeError):
    """Plain and distributed tensors in one op. Not a TypeError: the operators of Tensor replace those by their own."""


class WorldError(ShardwiseError, RuntimeError):
    """Ranks that disagree, or a call that is not valid in the world it was made in."""


class WatchError(WorldError):
    """Found by `debug.watch`, and raised on all ranks: ranks that do different things, raise, wait forever, or die.

    `ranks` are those that differ from most ranks, raised, or are gone.
    """

    def __init__(self, problem: str, fix: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(f"{problem}\n  {fix}" if fix else problem)
        self.problem, self.fix, self.ranks = problem, fix, ranks


class EraseError(ShardwiseError, RuntimeError):
    """A step that cannot be recorded: its Python code depends on data, or keeps what a replay would not make."""


class CommunicationError(ShardwiseError, RuntimeError):
    """Communication that is impossible or was not allowed."""


class BudgetError(ShardwiseError, AssertionError):
    """More communication than a `shardwise.debug.budget` allows: `fix` explains all that counted."""

    def __init__(self, problem: str, explanation: str) -> None:
        super().__init__(problem, explanation)
        self.args = (f"{problem}\n\n{explanation}",)


class SavedTensorError(ShardwiseError, RuntimeError):
    """A change to a tensor that a backward pass needs as it was."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, or whose files are missing, damaged, foreign or do not fit the state."""
