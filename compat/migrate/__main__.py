"""`python -m compat.migrate check|fix ...`, the same as `python -m compat check|fix ...`."""

import sys

from compat.migrate.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
