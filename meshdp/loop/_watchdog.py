"""What to do when a step hangs: say where every thread is, and end if asked to."""

import contextlib
import faulthandler
import numbers
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

HUNG = 76
"""Exit status of a run that the watchdog ended."""


class Watchdog:
    """Prints every thread's stack when a step takes longer than a limit.

    The limit holds from the second step of the run on: the first compiles.

    **Arguments:**

    - `seconds`: the limit for one step, or one batch of an evaluation.
    - `end`: also ends the process, with exit status 76, so that a scheduler can restart it.
        Nothing is saved: a step that hangs has donated its state.

    **Raises:**

    - `ValueError`: `seconds` is not above 0.
    """

    def __init__(self, seconds: float, *, end: bool = False):
        if not isinstance(seconds, numbers.Real) or not seconds > 0:
            raise ValueError(
                f"Watchdog(seconds={seconds!r}): a limit in seconds, above 0; leave the "
                "watchdog out to have none."
            )
        self.seconds, self.end = seconds, end
        self._program, self._step = "no program yet", 0
        self._since: float | None = None
        self._end: Callable[[int], object] = os._exit

    def began(self, program: str, step: int) -> None:
        """Notes what runs on the devices from now on."""
        self._program, self._step, self._since = program, step, time.monotonic()

    def rest(self) -> None:
        """Nothing is expected to finish, until something begins."""
        self._since = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches for as long as the context lasts."""
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(over,), name="meshdp-watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        told: float | None = None
        while not over.wait(min(self.seconds / 4, 5.0)):
            since = self._since
            if since is None or since == told or time.monotonic() - since < self.seconds:
                continue
            told = since
            self._tell(time.monotonic() - since)

    def _tell(self, seconds: float) -> None:
        end = f"; ending with status {HUNG}" if self.end else ""
        print(
            f"meshdp watchdog: nothing finished for {seconds:.1f} s (limit {self.seconds:g} s) "
            f"in step {self._step}. The last program given to the devices was "
            f"{self._program}{end}. Every thread:",
            file=sys.stderr,
            flush=True,
        )
        # The real stderr: `sys.stderr` may have no file descriptor.
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self.end:
            self._end(HUNG)
