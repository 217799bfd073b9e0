"""Where the records of a run go: the terminal, JSON lines, TensorBoard, functions."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JsonLines:
    """Appends each record to a file, as one line of JSON.

    A run that resumes appends to what is there; steps that it takes again are there twice,
    and the later line holds.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._file: Any = None

    def write(self, record: Record) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a run was killed while it wrote
                    self._file.write(b"\n")
        # Not a number is not JSON; readers of JSON lines stumble over it.
        line = json.dumps(_plain(record), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Writes the numbers of each record as TensorBoard events; needs tensorboardX."""

    def __init__(self, directory: str | os.PathLike):
        try:
            import tensorboardX
        except ImportError:
            raise ImportError(
                "TensorBoard logs need tensorboardX: pip install 'meshdp[train]'"
            ) from None
        self._make = lambda: tensorboardX.SummaryWriter(os.fspath(directory))
        self._writer: Any = None

    def write(self, record: Record) -> None:
        if self._writer is None:
            self._writer = self._make()
        if record["event"] == "start":
            self._writer.add_text("run", _markdown(record), record["step"])
            return
        prefix = {"train": "train/", "evaluation": "evaluation/"}.get(record["event"])
        if prefix is None:
            return
        for name, value in record.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and name not in ("step", "time"):
                self._writer.add_scalar(prefix + name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Console:
    """A progress bar in a terminal where rich is installed, plain lines elsewhere.

    **Arguments:**

    - `unit`: what the rate counts, such as `"tokens"`.
    - `per_example`: how many of them an example has.
    """

    def __init__(self, unit: str = "examples", per_example: float = 1, *, file: Any = None):
        self._unit, self._per_example = unit, per_example
        self._file = file
        self._bar: Any = None
        self._task: Any = None

    def _out(self):
        return self._file or sys.stdout

    def write(self, record: Record) -> None:
        event, step = record["event"], record["step"]
        if event == "start":
            self._start(record)
        elif event == "train" and self._bar is None:
            self._line(f"step {step}/{record['steps']}  {self._figures(record)}")
        elif event == "evaluation":
            best = "  best so far" if record.get("best") else ""
            self._line(f"evaluation after step {step}: {_numbers(record)}{best}")
        elif event in ("note", "end"):
            self._line(record["text"])

    def tick(self, record: Record) -> None:
        """Every step, for the bar."""
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=record["step"],
                description="training",
                figures=self._figures(record),
            )

    def _start(self, record: Record) -> None:
        mesh, layout = record["mesh"], record["layout"]
        axes = " x ".join(f"{a}={n}" for a, n in mesh["axes"].items()) or "one device"
        first, last = record["step"], record["steps"]
        todo = f"steps {first} to {last}" if first < last else f"all {last} steps are taken"
        self._line(
            f"state: {layout['numbers']:,} numbers; mesh: {axes} of {mesh['devices']} "
            f"{mesh['device_kind']}; {todo}"
        )
        if self._file is not None or not sys.stdout.isatty():
            return
        try:
            from rich import progress
        except ImportError:
            return
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[figures]}"),
        )
        self._task = self._bar.add_task(
            "compiling", total=record["steps"], completed=record["step"], figures=""
        )
        self._bar.start()

    def _figures(self, record: Record) -> str:
        parts = [f"loss {record['loss']:.4g}"] if record.get("loss") is not None else []
        if record.get("per_second") is not None:
            parts.append(f"{record['per_second'] * self._per_example:,.0f} {self._unit}/s")
        if record.get("seconds_left") is not None:
            parts.append(f"{_duration(record['seconds_left'])} left")
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        print(text, file=self._out(), flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Function:
    """Calls a function with each record."""

    def __init__(self, f: Callable[[Record], Any]):
        self.write = f

    def close(self) -> None:
        pass


class Sinks:
    """All sinks of a run; silent on every process but one."""

    def __init__(self, sinks: Sequence[Any], speaks: bool):
        self._sinks = list(sinks) if speaks else []
        self._ticks = [s.tick for s in self._sinks if hasattr(s, "tick")]

    def write(
        self, event: str, step: int, found: Mapping[str, Any] | None = None, /, **ours: Any
    ) -> None:
        """Hands on a record; what was `found` gives way where it has one of our names."""
        ours = {"event": event, "step": step, "time": time.time(), **ours}
        theirs = {f"metrics.{k}" if k in ours else k: v for k, v in (found or {}).items()}
        for sink in self._sinks:
            sink.write({**ours, **theirs})

    def tick(self, step: int, **record: Any) -> None:
        for tick in self._ticks:
            tick({"step": step, **record})

    @property
    def ticks(self) -> bool:
        return bool(self._ticks)

    def close(self) -> None:
        for sink in self._sinks:
            if hasattr(sink, "close"):
                sink.close()


def sinks(log: Any) -> list[Any]:
    """What `log=` of `fit` means, as sinks.

    **Raises:**

    - `TypeError`: something in it is none of what `log=` takes; each is named.
    """
    if log is None:
        return []
    several = isinstance(log, (list, tuple))
    out, problems = [], []
    for i, x in enumerate(log if several else [log]):
        if isinstance(x, str) and x == "console":
            out.append(Console())
        elif isinstance(x, (str, os.PathLike)) and os.fspath(x).endswith(".jsonl"):
            out.append(JsonLines(x))
        elif hasattr(x, "write") and not isinstance(x, type):
            out.append(x)
        elif callable(x) and not isinstance(x, type):
            out.append(Function(x))
        else:
            problems.append(f"  log{f'[{i}]' if several else ''}: {x!r}")
    if problems:
        raise TypeError(
            'log= takes "console", a path that ends in .jsonl, meshdp.TensorBoard(directory), '
            "an object with write(record), a function of a record, or a list of these, not:\n"
            + "\n".join(problems)
        )
    return out


def _duration(seconds: float) -> str:
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    m, s = divmod(s, 60)
    if m < 60:
        return f"{m}:{s:02} min"
    h, m = divmod(m, 60)
    return f"{h}:{m:02} h"


def _numbers(record: Record) -> str:
    shown = {k: v for k, v in record.items() if isinstance(v, float) and k != "time"}
    return ", ".join(f"{k} {v:.4g}" for k, v in shown.items())


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if isinstance(x, float):
        return x if x - x == 0 else repr(x)  # "nan", "inf"
    return x if x is None or isinstance(x, (str, int, bool)) else repr(x)


def _markdown(record: Record) -> str:
    return "\n".join(f"- {k}: `{json.dumps(_plain(v))}`" for k, v in record.items())
