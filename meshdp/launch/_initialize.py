"""Joining the processes of a job."""

import os
import signal
import sys
from typing import Any

import jax

from .. import _jaxapi


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = 30,
    **options: Any,
) -> None:
    """Joins the processes of a job into one JAX program; for the first line of a script.

    `jax.distributed.initialize` finds out by itself what it must know under Slurm, on
    Kubernetes (with `pip install 'jax[k8s]'`), under Open MPI and on TPU pods; elsewhere give
    it the three arguments. This calls it, with these differences:

    - It does nothing in a program that runs alone, and nothing in one that
        `python -m meshdp launch` has started and joined: the same script runs everywhere.
    - When a process dies without a word, or its machine does, the others end with an error
        after `heartbeat_seconds`, where JAX's default is 100. (Under `launch`, at once.)
    - An exception that nobody catches is printed and ends its process at once, with status 1
        and without `atexit`, where JAX would wait 300 s for the others, and they for it. One
        that leaves by `sys.exit` alone still waits so.
    - SIGTERM ends the program until `fit` begins to listen to it; JAX's preemption service,
        which `fit` does not need, would swallow it.

    **Arguments:**

    - `coordinator_address`: `"host:port"` of process 0.
    - `num_processes`, `process_id`: how many there are, and which this is, from 0.
    - `heartbeat_seconds`: how long a process may be silent before all are ended.
    - `options`: of `jax.distributed.initialize`, such as `local_device_ids`.

    **Raises:**

    - `ValueError`: `heartbeat_seconds` is less than 1; this is a pod of an indexed Kubernetes
        job, but JAX cannot ask Kubernetes; or what JAX is told is incomplete.
    - `RuntimeError`: JAX has been used already, or the processes do not find each other.
    """
    if heartbeat_seconds < 1:
        raise ValueError(f"heartbeat_seconds={heartbeat_seconds!r}: expected at least 1.")
    if jax.distributed.is_initialized():
        return
    # Before the coordination service begins, which installs its handler.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        joined = _jaxapi.join_processes(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_seconds,
            **options,
        )
    except RuntimeError as e:
        if "Failed to start RPC server" in str(e):
            e.add_note(
                f"Process 0 listens on the port of {coordinator_address or 'its cluster'}, "
                "which something else on this machine may use: choose another port "
                "(coordinator_address, or JAX_COORDINATOR_PORT in a cluster)."
            )
        raise
    if joined:
        _end_on_errors()
    if not joined and (num_processes or 1) > 1:
        raise ValueError(
            f"num_processes={num_processes}, but no coordinator_address: give the host and "
            'port of process 0, such as "10.0.0.1:1234".'
        )
    if not joined and "JOB_COMPLETION_INDEX" in os.environ:
        raise ValueError(
            "This is a pod of an indexed Kubernetes job, but JAX cannot find the others: "
            "pip install 'jax[k8s]', or give coordinator_address, num_processes and process_id."
        )


def _end_on_errors() -> None:
    before = sys.excepthook

    def hook(kind, value, traceback) -> None:
        before(kind, value, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
