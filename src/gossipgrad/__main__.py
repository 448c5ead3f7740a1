"""`python -m gossipgrad` is the command `gossipgrad`."""

import sys

from gossipgrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
