"""`python -m graphengine` is the command `graphengine`."""

import sys

from graphengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
