"""The errors shardwise raises, one class for each kind of mistake.

Each also derives from the built-in type that plain PyTorch would raise, so programs that catch `ValueError`
or `RuntimeError` keep working. Messages follow one pattern: what was asked, why it is impossible, what to do.

>>> raise PlacementError("Shard(dim=3) on a tensor of 2 dims", "use a dim in [-2, 1]")
Traceback (most recent call last):
...
shardwise.errors.PlacementError: Shard(dim=3) on a tensor of 2 dims: use a dim in [-2, 1]
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of every error raised here. `fix` is the part that says what to do."""

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}: {fix}" if fix else problem)


class PlacementError(ShardwiseError, ValueError):
    """Placements that do not fit the mesh or the tensor."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that is missing, is another one than the tensor's, or does not hold this rank."""


class ShapeError(ShardwiseError, ValueError):
    """Local shapes that cannot belong to one tensor."""


class LayoutError(ShardwiseError, ValueError):
    """A cut that no layout can express, or a layout that no placement list can express."""


class InputError(ShardwiseError, TypeError):
    """An argument of the wrong kind."""


class MixedTensorError(ShardwiseError, RuntimeError):
    """Plain and distributed tensors in one op. No TypeError: operators would swallow it and its advice."""


class WorldError(ShardwiseError, RuntimeError):
    """Ranks that disagree, or a call that makes no sense in the world it was made in."""


class CommunicationError(ShardwiseError, RuntimeError):
    """Communication that is impossible or was not allowed."""
