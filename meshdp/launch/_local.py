"""Several processes on this machine, joined on loopback into one JAX program."""

import collections
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GRACE = 2.0
"""Seconds that the others get to end by themselves when one has failed, and that any gets
between the request to stop and the kill."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended."""

    process: int
    returncode: int
    """The exit status; negative for a signal."""
    stdout: str
    stderr: str


class ProcessesFailed(RuntimeError):
    """Some process failed, or took too long. `ended` tells of each, in order."""

    def __init__(self, message: str, ended: Sequence[Ended], first: int | None = None):
        super().__init__(message)
        self.ended = list(ended)
        self.first = first
        """The process that failed first; `None` if time was up."""


def run(
    command: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    on_output: Callable[[int, str, str], None] | None = None,
    on_start: Callable[[Sequence[Any]], None] | None = None,
    patience: Mapping[int, float] | None = None,
    ends_by: Callable[[], float | None] = lambda: None,
    keep: int | None = None,
) -> list[Ended]:
    """Runs one Python program as several processes that form one JAX program.

    In each, `jax.distributed.initialize` has been called when the program begins. When one
    fails or time is up all are stopped, and what they started; so they are when the process
    that called this dies.

    **Arguments:**

    - `command`: what follows `python`: `["train.py", "--steps", "10"]`, `["-m", "package"]` or
        `["-c", "print(1)"]`.
    - `processes`: how many.
    - `devices`: CPU devices of each process. Without it JAX finds the devices.
    - `timeout`: in seconds, for all.
    - `env`: added to the environment.
    - `on_line`: called with (process, line) for each line of output while they run, from
        several threads.
    - `on_output`: as `on_line`, with (process, `"stdout"` or `"stderr"`, line).
    - `on_start`: called once with the processes, each of which has `.popen`.
    - `patience`: exit statuses after which the others get another time to end than `GRACE`,
        in seconds.
    - `ends_by`: as `timeout`, but asked again and again: when time is up, by `time.monotonic`.
    - `keep`: how many of the last lines of each stream are kept; all if `None`.

    **Returns:**

    How each process ended, in order, if all ended well.

    **Raises:**

    - `ProcessesFailed`: one ended with another status than 0, or time was up. The message
        holds the last lines that each wrote to stderr.
    - `ValueError`: `processes` or `devices` is less than 1.
    """
    for name, n in {"processes": processes, "devices": devices}.items():
        if n is not None and n < 1:
            raise ValueError(f"{name}={n}, expected at least 1.")
    address = f"127.0.0.1:{_free_port()}"
    # Nobody writes to this pipe. Where it ends, the caller has gone.
    alive, held = os.pipe()
    running = [
        _Process(
            i,
            [sys.executable, "-m", "meshdp.launch._join", *command],
            _environment(env, devices, address, processes, i, alive),
            alive,
            _listener(on_line, on_output),
            keep,
        )
        for i in range(processes)
    ]
    os.close(alive)
    try:
        if on_start is not None:
            on_start(running)
        end = float("inf") if timeout is None else time.monotonic() + timeout
        why = _wait(running, lambda: min(end, ends_by() or end), patience or {})
    finally:
        _stop(running)
        os.close(held)
    ended = [p.ended() for p in running]
    if why is None:
        return ended
    late = f"process {why} failed first" if why >= 0 else "time was up"
    if why < 0 and timeout is not None:
        late = f"{timeout:g} s were not enough"
    raise ProcessesFailed(
        f"{late}, of {processes} processes; all were stopped.\n"
        + "\n".join(
            f"--- process {e.process}, {_status(e.returncode)}\n{_tail(e.stderr)}"
            for e in ended
        ),
        ended,
        None if why < 0 else why,
    )


def _listener(on_line, on_output):
    def listen(process: int, stream: str, line: str) -> None:
        if on_line is not None:
            on_line(process, line)
        if on_output is not None:
            on_output(process, stream, line)

    return listen


class _Process:
    """A running process and the threads that read what it writes."""

    def __init__(self, number, argv, env, alive, on_line, keep=None):
        self.number = number
        self.popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(alive,),
            start_new_session=True,  # so that what it starts can be stopped with it
        )
        self._lines = (collections.deque[str](maxlen=keep), collections.deque[str](maxlen=keep))
        self._readers = [
            threading.Thread(target=self._read, args=(*which, on_line), daemon=True)
            for which in zip(
                ("stdout", "stderr"),
                (self.popen.stdout, self.popen.stderr),
                self._lines,
                strict=True,
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name, stream, lines, on_output):
        with stream:
            for line in stream:
                lines.append(line)
                on_output(self.number, name, line)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def ended(self) -> Ended:
        for reader in self._readers:
            reader.join(GRACE)
        stdout, stderr = map("".join, self._lines)
        return Ended(self.number, self.popen.wait(), stdout, stderr)


def _wait(
    running: Sequence[_Process], end: Callable[[], float], patience: Mapping[int, float]
) -> int | None:
    """Waits for all. Returns which failed first, -1 if time is up, `None` if all is well."""
    while True:
        codes = [p.popen.poll() for p in running]
        failed = [p.number for p, code in zip(running, codes, strict=True) if code]
        if failed:
            # They may have failed together; let all say why.
            now, code = time.monotonic(), running[failed[0]].popen.returncode
            until = min(now + patience.get(code, GRACE), max(end(), now + GRACE))
            _wait_until_ended(running, until)
            return failed[0]
        if None not in codes:
            return None
        if time.monotonic() > end():
            return -1
        time.sleep(0.02)


def _wait_until_ended(running: Sequence[_Process], deadline: float) -> None:
    for p in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.popen.wait(max(deadline - time.monotonic(), 0))


def _stop(running: Sequence[_Process]) -> None:
    left = [p for p in running if p.popen.poll() is None]
    for p in left:
        p.signal(signal.SIGTERM)
    _wait_until_ended(left, time.monotonic() + GRACE)
    for p in running:
        p.signal(signal.SIGKILL)  # also what a process that ended has left behind
    for p in running:
        p.popen.wait()


def _environment(extra, devices, address, processes, number, alive) -> dict[str, str]:
    env = dict(os.environ)
    if devices is not None:
        # The older way to ask for CPU devices, which JAX refuses beside the newer one.
        flags = re.sub(
            r"--xla_force_host_platform_device_count=\S*", "", env.pop("XLA_FLAGS", "")
        )
        env |= {"XLA_FLAGS": flags} if flags.strip() else {}
        env |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        }
    return {
        **env,
        **(extra or {}),
        "MESHDP_JOIN": f"{address} {processes} {number} {alive}",
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
