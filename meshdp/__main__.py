"""`python -m meshdp COMMAND`: the commands, each in a module of its own."""

import importlib
import os
import sys

# name -> the module with a `main(arguments) -> exit status`, and what it does.
COMMANDS = {
    "demo": ("meshdp._demo", "trains a language model on eight devices and proves it right"),
    "launch": ("meshdp.launch._command", "runs a program as several processes on this machine"),
}


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit status."""
    name, *rest = arguments or [""]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    lines = ["usage: python -m meshdp COMMAND [--help]", ""]
    lines += [f"  {command}: {what}" for command, (_, what) in COMMANDS.items()]
    if name in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    fault = f"there is no command {name!r}" if name else "a command is missing"
    print(f"python -m meshdp: {fault}. The commands: {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status == 130:
        # Stopped by Ctrl-C, perhaps while XLA compiles: taken down under its threads, JAX can
        # end in a segmentation fault.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
