"""`python -m compat run`: an old program, unchanged."""

import importlib.util
import os
import runpy
import sys
from collections.abc import Collection, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from compat._install import add_hint, install
from meshdp import _jaxapi

USAGE = """\
usage: python -m compat run [--cpu-devices N] SCRIPT [ARGS...]
       python -m compat run [--cpu-devices N] -m MODULE [ARGS...]

Runs a program with the names that JAX removed put back and jax.pmap replaced by compat.pmap.
--cpu-devices N gives it N devices on a machine that has only a CPU."""


def main(argv: Sequence[str]) -> int:
    rest = list(argv)
    module, decided, cpu_devices = False, (), 0
    while rest and rest[0].startswith("-") and not module:
        option, has_value, value = rest.pop(0).partition("=")
        if option in ("-h", "--help"):
            print(USAGE)
            return 0
        if option == "--":
            break
        if option == "-m":
            module = True
        elif option == "--cpu-devices":
            value = value if has_value else rest.pop(0) if rest else ""
            if not value.isdecimal() or not int(value):
                print(f"compat run: --cpu-devices wants a number of devices, not {value!r}")
                return 2
            decided = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES")
            cpu_devices = int(value)
        else:
            print(
                f"compat run: there is no option {option!r}. Those of the program come after "
                "it.\n"
            )
            print(USAGE)
            return 2
    if not rest:
        print(USAGE)
        return 2
    program = rest[0]
    if module:
        sys.path.insert(0, "")
        if not _can_run(program):
            print(f"compat run: there is no module {program!r} to run.")
            return 2
    elif not Path(program).exists():
        print(f"compat run: there is no file {program!r}. For a module write -m {program}.")
        return 2
    elif Path(program).is_dir() and not Path(program, "__main__.py").exists():
        print(f"compat run: {program!r} is a folder without a __main__.py.")
        return 2
    # The whole process is the program's, with the threads and the functions registered by
    # `atexit` that live on after its last line. So nothing is taken back.
    _prepare(cpu_devices)
    _follow_environment(decided)
    sys.argv = rest
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            # As `python SCRIPT` does: the script's own folder comes first.
            folder = Path(program).resolve()
            sys.path.insert(0, str(folder if folder.is_dir() else folder.parent))
            runpy.run_path(program, run_name="__main__")
    except Exception as e:
        add_hint(e)
        e.__traceback__ = _from_the_program(e.__traceback__)
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


def _from_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback as `python SCRIPT` would have it: without what ran the script."""
    ours = {main.__code__.co_filename, runpy.run_path.__code__.co_filename}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _prepare(cpu_devices: int) -> None:
    if cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    install()
    original = spawn.get_preparation_data

    def preparation(name: str) -> dict[str, Any]:
        # A process that multiprocessing starts afresh runs the program's main module again;
        # it loads this first.
        return {"compat": _Names(cpu_devices), **original(name)}

    spawn.get_preparation_data = preparation


class _Names:
    """To load one from a pickle is to put the names back."""

    def __init__(self, cpu_devices: int):
        self.cpu_devices = cpu_devices

    def __reduce__(self):
        return _prepare, (self.cpu_devices,)


def _can_run(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _follow_environment(decided: Collection[str]) -> None:
    """Lets the program set `JAX_...` variables before its `import jax`, as it could without us:
    JAX reads them when it is imported, and it has been by now.

    `decided`: the variables that our own options have settled.
    """

    class Environment(type(os.environ)):
        def __setitem__(self, key: str, value: str) -> None:
            super().__setitem__(key, value)
            # Later, a variable is meant for the processes that the program starts.
            if key not in decided and not _jaxapi.backend_is_up():
                _jaxapi.set_from_environment(key, value)

    os.environ.__class__ = Environment
