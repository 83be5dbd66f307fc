"""`python -m whisfusion`: the command line without an installation."""

import sys

from whisfusion.cli import main

if __name__ == "__main__":
    sys.exit(main())
