"""The commands `check` and `fix`."""

import argparse
import concurrent.futures
import contextlib
import difflib
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from compat.migrate._check import check_source
from compat.migrate._fix import fix_source
from compat.migrate._report import FORMATS, Placed
from compat.migrate._rewrite import load_libcst
from compat.migrate._sources import Source, Unreadable, find_sources, read_source, write_source
from compat.migrate._versions import NEWEST, parse_version

# Starting processes costs more than reading this many files.
_FEW = 40
# What Python's parser raises, the last two for what is nested too deeply.
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `check` or `fix`.

    **Arguments:**

    - `argv`: the command and its arguments, without the program's name.

    **Returns:**

    The exit code. `check`: 1 if something breaks, else 0. `fix`: 0 if every file was read.
    Either: 2 for a wrong argument, a file that is not Python or one that cannot be written,
    130 after Ctrl-C.
    """
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        paths = find_sources(args.paths)
        if args.command == "fix":
            load_libcst()
            return _fix(paths, args)
        return _check(paths, args)
    except (FileNotFoundError, ImportError) as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. Every file is as it was, or rewritten whole.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read us has seen enough; Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compat")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="say what pmap-era code does on today's JAX")
    fix = commands.add_parser("fix", help="rewrite it")
    for command in (check, fix):
        command.add_argument("paths", nargs="+", help="files (.py, .ipynb) and folders")
        command.add_argument(
            "--jax",
            type=_version,
            default=NEWEST,
            metavar="VERSION",
            help="the JAX to judge against, such as 0.10 (default: the newest known, "
            f"{NEWEST[0]}.{NEWEST[1]})",
        )
    check.add_argument("--format", choices=sorted(FORMATS), default="text")
    fix.add_argument("--diff", action="store_true", help="print the changes, write nothing")
    fix.add_argument(
        "--to",
        choices=["compat", "jax", "meshdp"],
        default="compat",
        help="compat: the smallest change (default); jax: what JAX itself offers; meshdp: "
        "recognised training steps out of pmap",
    )
    return parser


def _version(text: str) -> tuple[int, int]:
    try:
        return parse_version(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _check(paths: list[pathlib.Path], args: argparse.Namespace) -> int:
    jobs = [(p, args.jax) for p in paths]
    findings: list[Placed] = []
    unread: list[str] = []
    for found, error in _map(_check_one, jobs):
        findings += found
        unread += [error] if error else []
    output = FORMATS[args.format](findings, len(paths) - len(unread))
    if output:
        print(output)
    for error in unread:
        print(error, file=sys.stderr)
    if unread:
        return 2
    return int(any(f.severity == "breaks" for f in findings))


def _check_one(job: tuple[pathlib.Path, tuple[int, int]]) -> tuple[list[Placed], str]:
    path, version = job
    try:
        source = read_source(path)
        found = check_source(source.text, "compat", version)
    except Unreadable as e:
        return [], str(e)
    except _NOT_PYTHON as e:
        return [], _not_python(path, e)
    return [Placed.of(str(path), *source.place(f.span[0]), f) for f in found], ""


def _fix(paths: list[pathlib.Path], args: argparse.Namespace) -> int:
    jobs = [(p, args.to, args.jax) for p in paths]
    changed = 0
    unread = []
    for source, text, error in _map(_fix_one, jobs):
        if error:
            unread.append(error)
        if source is None:
            continue
        if args.diff:
            sys.stdout.write(_diff(source, text))
            continue
        try:
            write_source(source, text)
        except (OSError, UnicodeError) as e:
            unread.append(f"{source.path}: cannot be written: {e}. Left as it is.")
            continue
        changed += 1
        print(f"{source.path}: rewritten")
    for error in unread:
        print(error, file=sys.stderr)
    if not args.diff:
        print(f"{changed} of {len(paths)} file{'' if len(paths) == 1 else 's'} rewritten.")
    return 2 if unread else 0


def _fix_one(job) -> tuple[Source | None, str, str]:
    path, mode, version = job
    try:
        source = read_source(path)
        text = fix_source(source.text, mode, version, keep_imports=path.name == "__init__.py")
    except Unreadable as e:
        return None, "", str(e)
    except _NOT_PYTHON as e:
        return None, "", _not_python(path, e)
    return (source, text, "") if text != source.text else (None, "", "")


def _not_python(path: pathlib.Path, error: Exception) -> str:
    if isinstance(error, RecursionError | MemoryError):
        return f"{path}: nested too deeply to be read. Left as it is."
    if not isinstance(error, SyntaxError):
        return f"{path}: not Python: {error}. Left as it is."
    line = error.lineno or 0
    try:
        cell, line = read_source(path).place(line)
    except Unreadable:
        cell = None
    where = f"{path}:{line}" if cell is None else f"{path}:cell {cell}:{line}"
    return f"{where}: not Python {sys.version_info[0]}: {error.msg}. Left as it is."


def _diff(source: Source, text: str) -> str:
    # Of a notebook, the Python alone: a diff of JSON is no help to anybody.
    old, new = _lines(source.shown(source.text)), _lines(source.shown(text))
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, f"a/{source.path}", f"b/{source.path}")
    )


def _lines(text: str) -> list[str]:
    # `str.splitlines` also splits at form feeds and the like, where no line ends.
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _map(function, jobs):
    workers = min(os.cpu_count() or 1, 8)
    if len(jobs) <= _FEW or workers == 1:
        yield from map(function, jobs)
        return
    # Not fork: whoever calls us may have started JAX, whose threads do not survive it.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context)
    try:
        with _ignoring_ctrl_c():
            results = pool.map(function, jobs, chunksize=8)
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which the terminal sends to all of us.

    It is for the one that writes. What is ignored at the start of a process stays so, also
    while it still imports.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
