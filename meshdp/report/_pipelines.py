"""Pipelines over `"stage"`: what was predicted of each, and what the program does."""

import dataclasses
from collections.abc import Sequence

from meshdp.parallel._schedule import BACK, Schedule
from meshdp.report._hlo_text import Instruction, Module
from meshdp.report._loops import runs


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A `meshdp.parallel.pipeline` or `pipeline_loss` of a compiled step."""

    schedule: Schedule

    forward: int | None
    """How often a device sends to the next stage per call: once a tick. `None` in a loop of
    unknown length."""

    backward: int | None
    """How often it sends to the stage before; the last of these may be left out."""

    bytes: int
    """What is sent each time: a microbatch between two stages, on one device."""

    @property
    def passes(self) -> int:
        """How often it runs per call, as it does for each of the step's own microbatches."""
        return max(1, round((self.forward or 0) / self.schedule.ticks))

    @property
    def bubble(self) -> float | None:
        """Counted in the program; `schedule.bubble` is the predicted one."""
        if not self.forward:
            return None
        return self.schedule.bubble_of(self.forward / self.passes)


def read_pipelines(module: Module) -> tuple[Pipeline, ...]:
    """The pipelines of a program, in the order of their names.

    Those that are alike in everything are one, with more passes.
    """
    often = runs(module)
    sends: dict[Schedule, dict[bool, dict[str, int]]] = {}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode.removesuffix("-start") != "collective-permute":
                continue
            schedule = Schedule.read(i.op_name)
            if schedule is not None and computation.name in often:
                to = sends.setdefault(schedule, {True: {}, False: {}})[_is_back(i.op_name)]
                # One for each array that goes from stage to stage.
                size = to.get(computation.name, 0)
                to[computation.name] = size + _bytes(i)

    def count(places: dict[str, int]) -> int | None:
        counts = [often[name].count for name in places]
        return None if None in counts else sum(c for c in counts if c is not None)

    return tuple(
        Pipeline(
            schedule,
            count(to[False]),
            count(to[True]),
            max([*to[False].values(), *to[True].values()]),
        )
        for schedule, to in sorted(sends.items(), key=lambda item: item[0].scope)
    )


def _is_back(op_name: str) -> bool:
    _, _, inside = op_name.rpartition("pipeline")
    if f"/{BACK}/" in inside:
        return True
    # What is computed anew in the backward pass goes forward.
    return "transpose(" in op_name and "rematted_computation" not in op_name


def _bytes(send: Instruction) -> int:
    return send.arrays[0].bytes


HEADER = (
    "schedule",
    "stages",
    "microbatches",
    "repeats",
    "ticks",
    "sends on",
    "back",
    "bubble",
    "counted",
    "microbatch",
    "keeps",
)


def table(pipelines: Sequence[Pipeline], human) -> tuple[tuple[str, ...], ...]:
    """The rows under `HEADER`; `human` makes words of bytes."""
    known = lambda n: "?" if n is None else str(n)
    rows = []
    for p in pipelines:
        s = p.schedule
        rows.append(
            (
                s.block,
                str(s.stages),
                str(s.microbatches),
                str(s.repeats),
                f"{p.passes} x {s.ticks}" if p.passes > 1 else str(s.ticks),
                known(p.forward),
                known(p.backward),
                f"{s.bubble:.1%}",
                "?" if p.bubble is None else f"{p.bubble:.1%}",
                human(p.bytes),
                (human(s.kept * p.bytes) if s.remat else "all") + " and more" * s.zero_bubble,
            )
        )
    return tuple(rows)


def words(pipelines: Sequence[Pipeline], human) -> tuple[str, ...]:
    """What the table leaves open, and what each would keep under the other schedule."""
    lines = [
        (
            "Bubble: the share of time in which a device has nothing to do; as predicted, and "
            "as counted in the program."
        ),
        "Keeps: the inputs of stages that wait for the backward pass, per device (predicted).",
    ]
    for p in pipelines:
        s = p.schedule
        other = "pipeline_loss" if s.block == "pipeline" else "pipeline"
        would = dataclasses.replace(s, block=other, remat=True, zero_bubble=False)
        lines.append(f"As {other}, {s.scope} would keep {human(would.kept * p.bytes)}.")
        if p.bubble is not None and abs(p.bubble - s.bubble) > 1e-9:
            lines.append(
                f"{s.scope} sends {p.forward} times where {p.passes * s.ticks} were "
                "predicted: the compiler has changed its loop."
            )
    return tuple(lines)
