"""Run all divergences, or those whose names contain a text, and print how each ended.

python -m tests.debug.watching.all_divergences [text]
"""

import sys

from tests.debug.watching.divergences import CASES
from tests.debug.watching.ranks import Ranks
from tests.debug.watching.verdict import complaint


def main() -> int:
    chosen = [name for name in CASES if len(sys.argv) < 2 or sys.argv[1] in name]
    ranks, bad, slowest = Ranks(), 0, 0.0
    print(*ranks.run("agree"), sep="\n")
    for name in chosen:
        outcomes = ranks.run("diverge", name)
        said = complaint(name, outcomes)
        slowest = max(slowest, *(outcome.seconds if outcome else 99.0 for outcome in outcomes))
        print(
            f"{'ok ' if not said else 'BAD'} {max((o.seconds for o in outcomes if o), default=99):5.1f} s  {name}",
            flush=True,
        )
        if said:
            bad += 1
            print(said, *{str(outcome) for outcome in outcomes}, sep="\n    ", flush=True)
        if None in outcomes:
            ranks.close()
            ranks = Ranks()
    ranks.close()
    print(f"{len(chosen)} divergences, {bad} not named, the slowest took {slowest:.1f} s")
    return bad


if __name__ == "__main__":
    sys.exit(main())
