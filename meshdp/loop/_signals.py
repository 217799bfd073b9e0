"""Ending a run when the scheduler or Ctrl-C asks for it, on all processes at the same step."""

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator

import jax

from .. import _jaxapi

AGAIN = 75
"""Exit status of a run that was asked to end and has saved its state: `EX_TEMPFAIL` of
sysexits.h, "the user is invited to retry". Slurm, Kubernetes and our launcher can restart on
it."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

PATIENCE = 600.0
"""Seconds that a process waits for the others to say which step they have reached."""

_runs = itertools.count()


class Preempted(SystemExit):
    """A signal ended the run after step `step`, whose checkpoint is written.

    Not caught, it ends the program with exit status 75, for the scheduler to start it again.
    """

    def __init__(self, step: int, name: str):
        super().__init__(AGAIN)
        self.step = step
        """The last step that was taken."""
        self.signal = name
        """Such as `"SIGTERM"`."""

    def __str__(self) -> str:
        return f"{self.signal} ended the run after step {self.step}"


class Asked(Exception):
    """Unwinds out of an evaluation."""


class Stop:
    """Whether the run should end, answered alike on every process.

    Work comes in units (training steps, batches of an evaluation) that all processes begin in
    the same order. When any process is asked to end, each says how many units it has begun;
    all end after the largest of these numbers. A thread says so, because the main thread may
    be waiting for a device that waits for another process.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._begun = 0
        self._last: int | None = None
        self._held = False
        self._lock = threading.Lock()
        self._asked, self._decided = threading.Event(), threading.Event()
        self._closed = False
        self._topic = f"meshdp/stop/{next(_runs)}"
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        """Whether some process was asked to end, as far as this one knows yet."""
        return self._asked.is_set()

    def begin(self) -> bool:
        """Called before each unit: whether it may begin."""
        if jax.process_count() == 1:
            return not self._asked.is_set()
        with self._lock:
            if not self._held:
                self._begun += 1
                return True
        if self._decided.wait(PATIENCE) and self._begun < (self._last or 0):
            self._begun += 1
            return True
        return False

    @contextlib.contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Catches the signals for as long as the context lasts."""
        main = threading.current_thread() is threading.main_thread()
        if main:
            self._before = {s: signal.signal(s, self._caught) for s in SIGNALS}
        listener = None
        if jax.process_count() > 1:
            listener = threading.Thread(target=self._listen, name="meshdp-stop", daemon=True)
            listener.start()
        try:
            yield self
        finally:
            self._closed = True
            self._restore()
            if listener is not None:
                listener.join(5)

    def _restore(self) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)  # type: ignore[arg-type]
        self._before = {}

    def _caught(self, number, _frame) -> None:
        self.signal = signal.Signals(number)
        self._asked.set()
        # A second signal does what it did before `fit` was called.
        self._restore()
        if jax.process_index() == 0:
            print(
                f"{self.signal.name}: ending after the step in flight, with a checkpoint; "
                "once more ends at once.",
                file=sys.stderr,
                flush=True,
            )

    def _listen(self) -> None:
        name = None
        while name is None and not self._closed:
            if self.signal is not None:
                name = self.signal.name
                _jaxapi.store_set_once(f"{self._topic}/asked", name)
            else:
                name = _jaxapi.store_get(f"{self._topic}/asked", 0.5)
        if name is None:
            return
        with self._lock:
            self._held = True
            begun = self._begun
        self._asked.set()
        self.signal = self.signal or signal.Signals[name]
        _jaxapi.store_set(f"{self._topic}/{jax.process_index()}", str(begun))
        said = [
            _jaxapi.store_get(f"{self._topic}/{p}", PATIENCE)
            for p in range(jax.process_count())
        ]
        self._last = max(int(word or 0) for word in said)
        self._decided.set()
