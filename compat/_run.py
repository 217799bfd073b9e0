"""`python -m compat run`: an old program, unchanged."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = """\
usage: python -m compat run [--cpu-devices N] SCRIPT [ARGS...]
       python -m compat run [--cpu-devices N] -m MODULE [ARGS...]

Runs a program with the names that JAX removed put back and jax.pmap replaced by compat.pmap.
--cpu-devices N gives it N devices on a machine that has only a CPU."""


def main(argv: Sequence[str]) -> int:
    rest = list(argv)
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if rest else 2
    if rest[0].split("=")[0] == "--cpu-devices":
        option = rest.pop(0)
        value = option.partition("=")[2] if "=" in option else rest.pop(0) if rest else ""
        if not value.isdigit() or not int(value):
            print(f"compat run: --cpu-devices wants a number of devices, not {value!r}")
            return 2
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(value))
    module = bool(rest) and rest[0] == "-m"
    rest = rest[module:]
    if not rest:
        print(USAGE)
        return 2
    if not module and not Path(rest[0]).exists():
        print(f"compat run: there is no file {rest[0]!r}. For a module write -m {rest[0]}.")
        return 2
    from compat._install import add_hint, install

    before = sys.argv, sys.path[:]
    with install():
        sys.argv = list(rest)
        try:
            if module:
                sys.path.insert(0, "")
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            else:
                # As `python SCRIPT` does: the script's own folder comes first.
                sys.path.insert(0, str(Path(rest[0]).resolve().parent))
                runpy.run_path(rest[0], run_name="__main__")
        except Exception as e:
            add_hint(e)
            raise
        finally:
            sys.argv, sys.path[:] = before
    return 0
