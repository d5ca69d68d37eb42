"""The watch: it stops all ranks when they disagree, when one raises, waits forever or dies.

watch       the public `watch` and `unwatched`, and the environment variable SHARDWISE_WATCH
hooks       installs the hooks that record events; `op_events` and `collective_events` define the event of a call
journal     a stream of events for each group, and a description of each event; `places` finds the user's line
stream      a list of events as a rolling fingerprint, which can be looked up at an earlier position
monitor     the thread that publishes, compares and reports; `status` is what ranks publish, `board` the store
inquiry     asks all ranks for their event where two disagree; `words` writes the error
stopping    raises an error in another thread, whatever that does
"""

from .watch import unwatched, watch, watch_from_environment

__all__ = ["unwatched", "watch", "watch_from_environment"]
