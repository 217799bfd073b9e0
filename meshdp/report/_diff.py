"""What differs between the reports of two steps."""

import dataclasses
from collections.abc import Sequence

from meshdp.report._hlo import by_axis
from meshdp.report._report import Report


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure of two reports. `None`: it is not there."""

    what: str
    before: float | None
    after: float | None
    unit: str


@dataclasses.dataclass(frozen=True)
class Diff:
    """What differs between two reports; empty if nothing does."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        from meshdp.report._text import diff_text

        return diff_text(self)


def diff(before: Report, after: Report) -> Diff:
    """Compares two reports: what did a change do to communication, memory and work?

    Only what differs is listed: launches and bytes by axis and kind, then memory, flops
    and memory traffic. Predicted times are left out, since a measured CPU never repeats.

    **Raises:**

    - `TypeError`: if one of them is no report.
    """
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Report):
            raise TypeError(
                f"`{name}` must be a Report, as meshdp.report(step, *args) returns or "
                f"Report.from_json reads; got {type(given).__name__}."
            )
    a, b = _figures(before), _figures(after)
    keys = [*a, *(k for k in b if k not in a)]
    found = [Change(k[0], a.get(k), b.get(k), k[1]) for k in keys if a.get(k) != b.get(k)]
    return Diff(tuple(found))


def _figures(report: Report) -> dict[tuple[str, str], float]:
    """Every figure that `diff` compares, by its name and unit."""
    figures: dict[tuple[str, str], float] = {}
    for axes, kinds in by_axis(report.collectives).items():
        for kind, t in kinds.items():
            label = f"{kind} over {'+'.join(axes)}"
            figures[label, "launches"] = t.count
            figures[label + " in loops of unknown length", "collectives"] = t.unknown
            figures[f"{label}: sent per device", "B"] = t.sent_bytes
    figures = {k: v for k, v in figures.items() if v}
    memory = report.memory
    held: Sequence[tuple[str, int | None]] = (
        ("arguments", memory.argument_bytes),
        ("outputs", memory.output_bytes),
        ("aliased", memory.alias_bytes),
        ("temporaries", memory.temp_bytes),
    )
    figures |= {(f"memory: {what}", "B"): n for what, n in held if n is not None}
    figures["matrix flops", ""] = report.work.matmul_flops
    figures["memory traffic", "B"] = report.work.memory_bytes
    return figures
