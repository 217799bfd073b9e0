"""`python -m meshdp.launch._join PROGRAM ...`: one of the processes of `_local.run`."""

import os
import runpy
import sys
import threading
import traceback

import jax


def main() -> None:
    address, processes, number, alive = os.environ.pop("MESHDP_JOIN").split()
    threading.Thread(target=_end_with_the_caller, args=(int(alive),), daemon=True).start()
    jax.distributed.initialize(
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
        if not status:
            raise
        if not isinstance(e, SystemExit):
            traceback.print_exc()
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


def _end_with_the_caller(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
