"""Watch over ranks that disagree, raise, wait forever or die.

watch       switches it on, and the environment variable SHARDWISE_WATCH
hooks       installs what records events; `op_events`, `collective_events`: which event each call is
journal     a stream of events for each group, and what each event was in words; `places` finds the user's line
stream      from events to a rolling fingerprint, and back
monitor     the thread that publishes, compares and declares; `status`, `board`: what ranks publish in the store
inquiry     what each rank did where they disagree; `words` says it
stopping    raises an error in a thread wherever that is
"""

from .watch import unwatched, watch, watch_from_environment

__all__ = ["unwatched", "watch", "watch_from_environment"]
