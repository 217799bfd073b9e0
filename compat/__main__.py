"""`python -m compat run|check|fix|doctor`."""

import sys
from collections.abc import Sequence

USAGE = """\
usage: python -m compat COMMAND ...

  run SCRIPT ARGS...   run an old program unchanged (also -m MODULE)
  check PATHS...       say what to change
  fix PATHS...         change it
  doctor               print devices, versions, and packages that use removed names"""


def main(argv: Sequence[str]) -> int:
    command, *rest = argv or [""]
    if command == "run":
        from compat import _run

        return _run.main(rest)
    if command == "doctor":
        if rest:
            asks = rest[0] in ("-h", "--help")
            print(USAGE if asks else f"compat doctor takes no arguments, not {rest[0]!r}.")
            return 0 if asks else 2
        from compat import _doctor

        return _doctor.main()
    if command in ("check", "fix"):
        from compat.migrate import cli

        return cli.main([command, *rest])
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command:
        print(f"compat has no command {command!r}.")
    print(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
