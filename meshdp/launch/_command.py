"""`python -m meshdp launch`: one program as several processes on this machine."""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from . import _local

AGAIN = 75
"""Exit status of a program that was asked to end and has saved its state (`meshdp.fit`)."""

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Fault(Exception):
    """What is wrong with the flags: one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Fault(f"{message}; --help lists the flags")


def main(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit status: of the process that failed first, or 0.

    A process that a signal ended counts as 128 and the signal's number.
    """
    try:
        flags = parse(arguments)
        check(flags.program)
    except Fault as e:
        print(f"python -m meshdp launch: {e}.", file=sys.stderr)
        return 2
    with _forwarding(flags.grace) as forward:
        for left in range(flags.max_restarts, -1, -1):
            status, words = _once(flags, forward)
            if not status:
                return 0
            again = left and not forward.seen
            rest = f"; starting again, {left} restart{'s'[: left > 1]} left" if again else ""
            _say(f"{words}{rest}")
            if not again:
                break
    return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; what follows the first that is no flag is the program's own.

    **Raises:**

    - `Fault`: a flag or a value that cannot be, or no program.
    """
    parser = _Parser(
        prog="python -m meshdp launch",
        description="Runs a program as several processes that form one JAX program.",
        usage="python -m meshdp launch [flags] (script.py | -m module | -c code) [arguments]",
        allow_abbrev=False,
    )
    number = lambda least: lambda text: _number(text, least)
    parser.add_argument(
        "--processes", type=number(1), default=2, metavar="N", help="how many (2)"
    )
    parser.add_argument(
        "--devices",
        type=number(1),
        metavar="N",
        help="CPU devices of each process; without it JAX finds the devices",
    )
    parser.add_argument(
        "--max-restarts",
        type=number(0),
        default=0,
        metavar="N",
        help="how often to start all again when one has failed (0)",
    )
    parser.add_argument(
        "--grace",
        type=number(0),
        default=60,
        metavar="SECONDS",
        help="for all to save and end after a signal, and for the others to do so when one "
        "has; then they are killed (60)",
    )
    own, program = _divided(arguments)
    flags = parser.parse_args(own)
    if not program:
        raise Fault("a program is missing: script.py, -m module or -c code")
    flags.program = program
    return flags


def check(program: Sequence[str]) -> None:
    """Tells before anything is started what each process would tell with a traceback.

    **Raises:**

    - `Fault`: there is no such program.
    """
    kind = program[0]
    if kind in ("-m", "-c"):
        if len(program) < 2:
            raise Fault(f"{kind} takes {'a module' if kind == '-m' else 'code'}")
        # Of a package only the outermost: to look inside would import it.
        if kind == "-m" and importlib.util.find_spec(program[1].partition(".")[0]) is None:
            raise Fault(f"there is no module {program[1]!r}")
    elif not os.path.exists(kind):
        raise Fault(f"there is no file {kind!r}")


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, and the program with its arguments."""
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if not word.startswith("--") and word != "-h":
            break
        i += 1 if "=" in word or word in ("-h", "--help") else 2
    return list(arguments[:i]), list(arguments[i:])


def _number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def _once(flags: argparse.Namespace, forward: "_Forward") -> tuple[int, str]:
    """Runs the program once: the exit status, and what to say of it."""
    try:
        _local.run(
            flags.program,
            processes=flags.processes,
            devices=flags.devices,
            on_output=_print,
            on_start=forward.to,
            patience={AGAIN: flags.grace},
            ends_by=lambda: forward.ends_by,
            keep=20,
        )
    except _local.ProcessesFailed as e:
        if e.first is None:
            name = signal.Signals(forward.seen[0]).name
            words = f"not all had ended {flags.grace} s after {name}, the --grace"
            return 128 + forward.seen[0], f"{words}; they were killed"
        code = e.ended[e.first or 0].returncode
        words = f"process {e.first} ended with {_local._status(code)}; all were stopped"
        return code if code > 0 else 128 - code, words
    return 0, ""


class _Forward:
    """Passes signals on to the processes that run."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self.seen: list[int] = []
        self.ends_by: float | None = None
        """When all must have ended, by `time.monotonic`."""
        self._running: Sequence[Any] = ()

    def to(self, running: Sequence[Any]) -> None:
        self._running = running
        for number in self.seen:  # that came while the processes were being started
            self._send(number)

    def __call__(self, number: int, _frame: Any) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self.seen.append(number)
            self.ends_by = self.ends_by or time.monotonic() + self._grace
        self._send(number)

    def _send(self, number: int) -> None:
        # To the program alone, not to what it has started: workers that read its data must
        # live until it has ended.
        for p in self._running:
            if p.popen.poll() is None:
                os.kill(p.popen.pid, number)


@contextlib.contextmanager
def _forwarding(grace: float):
    forward = _Forward(grace)
    before = {s: signal.signal(s, forward) for s in FORWARDED}
    try:
        yield forward
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _print(process: int, stream: str, line: str) -> None:
    # One write, so that lines of several processes do not mix.
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(f"[{process}] {line.rstrip()}\n")
    out.flush()


def _say(words: str) -> None:
    print(f"meshdp launch: {words}.", file=sys.stderr, flush=True)
