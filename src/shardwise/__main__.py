"""The command line: `python -m shardwise COMMAND`, also installed as the script `shardwise`."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
