"""Kill each of four ranks by SIGKILL, asleep and in a collective, and print after how many seconds the others raise.

python -m tests.debug.watching.all_kills

The seconds begin when the watch is switched on, just before the kill. More than 15 are a failure.
"""

import itertools
import sys

from tests.debug.watching.ranks import RANKS, Ranks
from tests.debug.watching.verdict import complaint_about_kill

MOST = 15.0


def main() -> int:
    bad = 0
    places = {False: "in another process", True: "in rank 0"}
    for store_in_rank_0, where, victim in itertools.product(places, ("asleep", "collective"), range(RANKS)):
        ranks = Ranks(store_in_rank_0=store_in_rank_0)
        outcomes = ranks.run("die", victim, where)
        ranks.close()
        slowest = max((outcome.seconds for outcome in outcomes if outcome), default=99.0)
        said = complaint_about_kill(victim, outcomes) or ("too slow" if slowest > MOST else "")
        case = f"rank {victim} is killed, the others {where}, the store {places[store_in_rank_0]}"
        print(f"{'BAD' if said else 'ok '} {slowest:5.1f} s  {case} {said}", flush=True)
        bad += bool(said)
    return bad


if __name__ == "__main__":
    sys.exit(main())
