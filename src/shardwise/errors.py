"""The errors that shardwise raises, one class for each kind of mistake.

Each also derives from the built-in type that plain PyTorch would raise, so programs that catch `ValueError` or
`RuntimeError` keep working. A message contains the call, why it is impossible, and what to write instead.

>>> raise PlacementError("Shard(dim=3) on a tensor of 2 dims", "use a dim in [-2, 1]")
Traceback (most recent call last):
...
shardwise.errors.PlacementError: Shard(dim=3) on a tensor of 2 dims: use a dim in [-2, 1]
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """The base class of all errors: `problem` is what is impossible and why, `fix` what to write instead."""

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
    """Ranks that do different things, raise, wait forever or die. `debug.watch` raises this on all ranks.

    `ranks` are those that differ from most ranks, have raised an error, or have died.
    """

    def __init__(self, problem: str, fix: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(f"{problem}\n  {fix}" if fix else problem)
        self.problem, self.fix, self.ranks = problem, fix, ranks


class EraseError(ShardwiseError, RuntimeError):
    """A step that cannot be recorded: its Python code depends on data, or stores what a replay would not make."""


class CommunicationError(ShardwiseError, RuntimeError):
    """Communication that is impossible or not allowed."""


class BudgetError(ShardwiseError, AssertionError):
    """More communication than `shardwise.debug.budget` allows; `fix` lists all that was counted."""

    def __init__(self, problem: str, explanation: str) -> None:
        super().__init__(problem, explanation)
        self.args = (f"{problem}\n\n{explanation}",)


class SavedTensorError(ShardwiseError, RuntimeError):
    """A change to a tensor that a backward pass needs unchanged."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, or whose files are missing, damaged, foreign or do not fit the state."""
