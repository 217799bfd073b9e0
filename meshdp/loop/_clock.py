"""How long steps take, without what is no step: compilation, evaluation, saving."""

import threading
import time
from typing import Any

import jax
import numpy as np

_compiled = {"seconds": 0.0}
_listening = threading.Event()


def compile_seconds() -> float:
    """Seconds that this process has spent in the compiler, since the first call."""
    if not _listening.is_set():
        _listening.set()
        jax.monitoring.register_event_duration_secs_listener(_heard)
    return _compiled["seconds"]


def _heard(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled["seconds"] += duration_secs


class Clock:
    """Times the steps of a run, from when the results of one are there to those of the next."""

    def __init__(self, start: int, steps: int):
        self.start, self.steps, self.done = start, steps, start
        self._compiled = self._compiled_first = compile_seconds()
        self._mark: float | None = None
        self._began: float | None = None
        self._times: list[float] = []
        self._rows = 0
        self._total, self._count, self._all_rows = 0.0, 0, 0

    def finished(self, rows: int) -> None:
        """The results of one more step, on `rows` examples, are there."""
        now, compiled = time.monotonic(), compile_seconds()
        self.done += 1
        if self._mark is not None:
            seconds = max(now - self._mark - (compiled - self._compiled), 1e-9)
            self._times.append(seconds)
            self._rows += rows
            self._total, self._count = self._total + seconds, self._count + 1
            self._all_rows += rows
        if self._began is None:
            # Of what came before, most was compilation.
            self._began = now
            self._after_first = compiled
        self._mark, self._compiled = now, compiled

    def pause(self) -> None:
        """What comes until the next step is finished is no step."""
        self._mark = None

    def left(self) -> float | None:
        """Seconds to the end, at the pace of this run, evaluation and saving included."""
        if self._began is None or self.done - self.start < 2:
            return None
        compiled = compile_seconds() - self._after_first
        spent = time.monotonic() - self._began - compiled
        return max(spent, 0.0) / (self.done - self.start - 1) * (self.steps - self.done)

    def rate(self) -> float | None:
        """Examples per second of this run."""
        return self._all_rows / self._total if self._count else None

    def interval(self) -> dict[str, float | None]:
        """The figures since the last call."""
        times, rows = self._times, self._rows
        self._times, self._rows = [], 0
        p50, p95 = np.percentile(times, [50, 95]) if times else (None, None)
        return {
            "per_second": rows / sum(times) if times else None,
            "step_seconds_p50": None if p50 is None else float(p50),
            "step_seconds_p95": None if p95 is None else float(p95),
            "compile_seconds": compile_seconds() - self._compiled_first,
        }


def memory(devices: list[Any]) -> dict[str, int | None]:
    """Bytes in use on the fullest of the devices, now and at most; `None` where none are told,
    as on CPU."""
    stats = [d.memory_stats() or {} for d in devices]
    in_use = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    peak = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return {
        "device_bytes": max(in_use, default=None),
        "device_bytes_peak": max(peak, default=None),
    }
