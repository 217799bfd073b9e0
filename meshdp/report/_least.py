"""The least that a step must send, and how near it comes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from meshdp.report._hlo import Collective, total


@dataclasses.dataclass(frozen=True)
class Share:
    """The traffic of some mesh axes, in bytes that one device sends per call."""

    axes: tuple[str, ...]

    least_bytes: int | None
    """`None` where it is not worked out."""

    sent_bytes: int
    why: str
    """The formula, in words."""

    @property
    def ratio(self) -> float | None:
        """Sent over least: 1 is the best there is; infinite where nothing need be sent."""
        if self.least_bytes is None:
            return None
        if self.least_bytes:
            return self.sent_bytes / self.least_bytes
        return float("inf") if self.sent_bytes else 1.0


@dataclasses.dataclass(frozen=True)
class Least:
    """A step against the least possible traffic of its mesh."""

    shares: tuple[Share, ...]

    @property
    def ratio(self) -> float | None:
        """All that is sent over all that must be, of the axes for which that is known."""
        known = [s for s in self.shares if s.least_bytes is not None]
        least = sum(s.least_bytes or 0 for s in known)
        return Share((), least, sum(s.sent_bytes for s in known), "").ratio


def against(
    found: Sequence[Collective], least: Mapping[tuple[str, ...], tuple[int, str]]
) -> Least:
    """Sets what a program sends against `least`: axes -> (bytes, the formula in words).

    Each collective belongs to the first group that has one of its axes, so that nothing is
    counted twice or left out. Of what belongs to none, the least is not known.
    """
    taken: set[int] = set()
    shares = []
    for axes, (number, why) in least.items():
        mine = [k for k, c in enumerate(found) if k not in taken and set(c.axes) & set(axes)]
        taken |= set(mine)
        shares.append(Share(axes, number, _sent(found[k] for k in mine), why))
    rest = [c for k, c in enumerate(found) if k not in taken]
    if rest:
        axes = tuple(dict.fromkeys(a for c in rest for a in c.axes))
        shares.append(Share(axes, None, _sent(rest), "not worked out"))
    return Least(tuple(shares))


def _sent(found: Iterable[Collective]) -> int:
    return total(found).sent_bytes
