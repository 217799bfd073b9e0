"""`python -m meshdp.launch._join PROGRAM ...`: one of the processes of `_local.run`."""

import os
import runpy
import signal
import sys
import threading
import traceback
import types

from ._initialize import initialize


def main() -> None:
    address, processes, number, alive = os.environ.pop("MESHDP_JOIN").split()
    threading.Thread(target=_end_with_the_caller, args=(int(alive),), daemon=True).start()
    initialize(
        address,
        int(processes),
        int(number),
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
        initialization_timeout=120,
    )
    try:
        _run(*sys.argv[1:])
    except BaseException as e:
        status = e.code if isinstance(e, SystemExit) else 1
        if isinstance(e, KeyboardInterrupt):
            status = 128 + signal.SIGINT
        if not status:
            raise
        if not isinstance(e, SystemExit):
            traceback.print_exception(e.with_traceback(_below(e.__traceback__)))
        elif not isinstance(status, int):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # An ordinary exit would wait in `jax.distributed.shutdown` for the others, which may
        # be waiting in a collective for this one.
        os._exit(status if isinstance(status, int) else 1)


def _run(kind: str, *rest: str) -> None:
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _below(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Without the frames of ours and of `runpy`, as if Python had run the program itself."""
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        tb = tb.tb_next
    return tb


def _end_with_the_caller(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
