"""The verifier: compare every rule, with every placement it allows, with one device.

    python -m shardwise.testing.verify [--quick] [--only NAME] [--limit N] [--seed N]

For each entry of PyTorch's operator database and of our own samples:

- the function is checked with sampled placements of its arguments, forward and backward;
- each op that it calls is called again with the placements that its rule allows: every factor sharded, also inside a
  dim, and every operand Partial that may be, on meshes of 2, 3, 4 and 2x2 ranks, where shards are uneven or empty;
- factors that must be replicated are probed: could they be sharded? These are hints, not failures.

    entry      one entry, in this process
    children   entries in child processes, since some ops crash on odd inputs; a crash is a failure of its entry
    summary    what all entries show together, and the rules that none of them reached

The exit code is 1 if there was a failure.
"""

from .children import Child, verify_all
from .entry import FULL, QUICK, Effort, Report, Tried, verify, verify_samples
from .summary import summary, unreached

__all__ = [
    "FULL",
    "QUICK",
    "Child",
    "Effort",
    "Report",
    "Tried",
    "summary",
    "unreached",
    "verify",
    "verify_all",
    "verify_samples",
]
