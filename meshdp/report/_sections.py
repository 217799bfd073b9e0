"""The report as sections of words, tables and pictures, whatever will show them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from meshdp.report import _pipelines
from meshdp.report._hlo import Collective, by_axis, human_bytes, total
from meshdp.report._memory import Leaf
from meshdp.report._pictures import (
    fold,
    leaf_svg,
    leaf_text,
    mesh_svg,
    mesh_text,
    scaling_svg,
)
from meshdp.report._report import Report
from meshdp.report._time import BOUNDS, takeover


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    caption: str
    text: str
    svg: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the report. Of the table's columns the first `left` and the last `tail`
    are words, the others numbers."""

    title: str
    lines: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left: int = 1
    tail: int = 0
    pictures: tuple[Picture, ...] = ()

    def is_word(self, column: int) -> bool:
        return column < self.left or column >= len(self.header) - self.tail


def sections(report: Report, most: int | None = 12) -> Iterator[Section]:
    """The parts of a report in order; long tables keep their `most` largest rows."""
    yield _summary(report)
    yield _traffic(report)
    yield _each(report, most)
    if report.least:
        yield _least(report)
    if report.pipelines:
        yield Section(
            title="Pipeline",
            lines=_pipelines.words(report.pipelines, human_bytes),
            header=_pipelines.HEADER,
            rows=_pipelines.table(report.pipelines, human_bytes),
        )
    yield from _memory(report, most)
    yield _work(report)
    if report.scaling:
        yield _scaling(report)
    yield _places(report, most)


def human(n: float, unit: str = "") -> str:
    """Three figures and an SI prefix: `1.2 Tflop`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(n) < 999.5 or prefix == "P":
            break
        n /= 1000
    return f"{n:.3g} {prefix}{unit}".rstrip()


def human_seconds(s: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s / 1e-9:.3g} ns"


def _axes(axes: Sequence[str]) -> str:
    return "+".join(axes)


def _summary(report: Report) -> Section:
    shape = " x ".join(f"{a}={n}" for a, n in report.mesh.items() if n > 1) or "one device"
    traffic = report.traffic
    kind = report.device.kind if report.device else "unknown device"
    lines = [
        f"{len(report.device_ids)} devices ({kind}), {shape}, jax {report.jax_version}",
        f"sends {human_bytes(traffic.sent_bytes)} per device in {traffic.count} collectives",
        f"holds {human_bytes(report.memory.total_bytes)} per device",
        f"computes {human(report.work.flops, 'flop')} per device",
    ]
    if traffic.unknown:
        lines[1] += f", and {traffic.unknown} more in loops of unknown length"
    if report.bound:
        b = report.bound
        lines.append(f"needs at least {human_seconds(b.seconds)}, bound by {b.by} (predicted)")
    if report.seconds is not None:
        use = report.utilisation
        lines.append(
            f"took {human_seconds(report.seconds)} (measured)"
            + (f", model flops utilisation {use:.1%}" if use is not None else "")
        )
    return Section(title=report.name, lines=tuple(lines))


def _traffic(report: Report) -> Section:
    rows = []
    for axes, kinds in by_axis(report.collectives).items():
        for kind, t in kinds.items():
            count = f"{t.count}" + (f" + {t.unknown}?" if t.unknown else "")
            rows.append(
                (_axes(axes), kind, count, human_bytes(t.bytes), human_bytes(t.sent_bytes))
            )
    t = total(report.collectives)
    rows.append(("total", "", str(t.count), human_bytes(t.bytes), human_bytes(t.sent_bytes)))
    return Section(
        title="Communication by mesh axis",
        lines=("Per device and call. Sent: by the ring formula.",),
        header=("axis", "collective", "count", "bytes", "sent"),
        rows=tuple(rows),
        left=2,
    )


def _where(c: Collective) -> str:
    depth = f"in {c.loop_depth} loop{'s' * (c.loop_depth > 1)}" if c.loop_depth else ""
    return ", ".join(w for w in (depth, "in a branch" * c.conditional) if w)


def _short(path: str, parts: int = 2) -> str:
    return "/".join(path.split("/")[-parts:])


_BOILERPLATE = re.compile(
    r"jit\(.*\)|shard_map|while|body|cond|closed_call|eval_jaxpr|checkpoint|pjit|"
    r"rematted_computation|branch_\d+_fun|"
)
_WRAPPED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")
_PIPELINE = re.compile(r"(pipeline|pipeline_loss)\(.*\)")


def _scopes(op_name: str) -> str:
    """A path of operations without what JAX put around them."""
    scopes = []
    for scope in op_name.split("/"):
        while wrapped := _WRAPPED.fullmatch(scope):
            scope = wrapped[1]
        if not _BOILERPLATE.fullmatch(scope):
            pipeline = _PIPELINE.fullmatch(scope)
            scopes.append(pipeline[1] if pipeline else scope)
    return "/".join(scopes)


def what(c: Collective) -> str:
    """The argument that a collective moves, or its operation without JAX's own scopes.

    The first word says in which pass it is, where that shows.
    """
    phase = ""
    if "transpose(" in c.op_name:
        phase = "recomputed" if "rematted_computation" in c.op_name else "backward"
    elif "jvp(" in c.op_name:
        phase = "forward"
    argument = re.sub(r"\[\d+\]", "[*]", c.argument)
    # XLA joins the names of what it fused: "a/(b/c:d)".
    fused = re.fullmatch(r"(?:.*/)?\((.*:.*)\)", c.op_name)
    names = fused[1].split(":") if fused else [c.op_name]
    names = list(dict.fromkeys(filter(None, map(_scopes, names))))
    return f"{phase} {argument or ', '.join(names)}".strip()


def _each(report: Report, most: int | None) -> Section:
    """One row for all those that differ in nothing but where they are in the program."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for c in report.collectives:
        fused = " (fused)" if c.part is not None else ""
        source = c.source if most is None else _short(c.source)
        key = c.kind + fused, _axes(c.axes), f"{c.dtype}{list(c.shape)}"
        alike.setdefault((*key, _where(c), what(c), source), []).append(c)
    weight = lambda same: sum(c.sent_bytes * (1 if c.count is None else c.count) for c in same)
    order = sorted(alike.items(), key=lambda item: -weight(item[1]))
    rows = []
    for (kind, axes, operand, where, operation, source), same in order[:most]:
        counts = [c.count for c in same if c.count is not None]
        count = str(sum(counts)) if len(counts) == len(same) else "?"
        count = "<=" * same[0].conditional + count
        sent = human_bytes(same[0].sent_bytes)
        rows.append((kind, axes, operand, count, sent, where, operation, source))
    hidden = len(order) - len(rows)
    return Section(
        title="Each collective, largest first",
        lines=(f"{hidden} smaller kinds are not shown.",) if hidden else (),
        header=(
            "collective",
            "axis",
            "operand",
            "count",
            "sent each",
            "where",
            "what",
            "source",
        ),
        rows=tuple(rows),
        left=3,
        tail=3,
    )


def _least(report: Report) -> Section:
    assert report.least is not None
    rows = [
        (
            _axes(s.axes),
            s.why,
            "?" if s.least_bytes is None else human_bytes(s.least_bytes),
            human_bytes(s.sent_bytes),
            "?" if s.ratio is None else f"{s.ratio:.2f}",
        )
        for s in report.least.shares
    ]
    lines = [f"All together: {report.least.ratio:.2f} times the least."]
    if any(s.ratio is not None and s.ratio < 0.995 for s in report.least.shares):
        # Where no gradient of a layer's input is asked for, its weight has no backward use.
        lines.append("Below 1: a weight that the formula gathers twice was gathered once.")
    return Section(
        title="Against the least possible",
        lines=tuple(lines),
        header=("axis", "why", "least", "sent", "ratio"),
        rows=tuple(rows),
        left=2,
    )


def _memory(report: Report, most: int | None) -> Iterator[Section]:
    m = report.memory
    known = lambda n: "not said" if n is None else human_bytes(n)
    rows = [("arguments", human_bytes(m.argument_bytes))]
    rows += [(f"  of it {role}", human_bytes(n)) for role, n in m.by_role.items()]
    rows += [
        ("outputs", known(m.output_bytes)),
        ("  of it in donated arguments", human_bytes(m.alias_bytes)),
        ("temporaries", known(m.temp_bytes)),
        ("code", known(m.code_bytes)),
        ("total", human_bytes(m.total_bytes)),
    ]
    lines = []
    device = report.device
    if device and device.memory_bytes:
        limit = device.memory_bytes
        lines.append(f"{m.total_bytes / limit:.0%} of the {human_bytes(limit)} of a device.")
        for r in report.remedies(limit):
            lines.append(
                f"{r.change}: {human_bytes(r.predicted_bytes)}, "
                f"{'fits' if r.fits else 'still too much'} (predicted: {r.why})"
            )
    lost = [a for a in m.leaves if a.lost_donation]
    if lost:
        size = human_bytes(sum(a.device_bytes for a in lost))
        lines.append(f"Donated in vain, {size}: " + ", ".join(a.path for a in lost[:8]))
    yield Section(
        title="Memory per device",
        lines=tuple(lines),
        header=("what", "bytes"),
        rows=tuple(rows),
    )
    split = [f for f in fold(m.leaves) if f.leaf.could_split]
    if split:
        yield Section(
            title="Replicated although a split would fit",
            header=("leaf", "shape", "split"),
            rows=tuple(
                (f.path, _shape(f.leaf, f.count), f.leaf.could_split) for f in split[:most]
            ),
            left=3,
        )


def _shape(leaf: Leaf, count: int) -> str:
    return (f"{count} x " if count > 1 else "") + f"{leaf.dtype}{list(leaf.shape)}"


def _work(report: Report) -> Section:
    w = report.work
    rows = [
        ("matrix products and convolutions", human(w.matmul_flops, "flop")),
        ("  of it computed again by checkpoints", human(w.recomputed_flops, "flop")),
        ("everything else", human(w.flops - w.matmul_flops, "flop")),
        ("memory traffic", human_bytes(w.memory_bytes)),
    ]
    lines = []
    if w.unknown_loops:
        lines.append(f"{w.unknown_loops} loops of unknown length are counted once.")
    if report.bound and report.device:
        d = report.device
        source = "measured here" if d.measured else "from the data sheet or given"
        lines.append(
            f"Speeds of one device ({d.kind}, {source}): {human(d.flops, 'flop/s')}, memory "
            f"{human_bytes(d.memory)}/s, links {human_bytes(d.link)}/s, network "
            f"{human_bytes(d.network)}/s."
        )
        lines.append("Times are predicted lower bounds, as if all three overlapped.")
        for name in BOUNDS:
            mark = ", the bound" if name == report.bound.by else ""
            rows.append((f"time of {name}{mark}", human_seconds(getattr(report.bound, name))))
    return Section(
        title="Work and time per device",
        lines=tuple(lines),
        header=("what", "amount"),
        rows=tuple(rows),
    )


def _scaling(report: Report) -> Section:
    rows = tuple(
        (
            str(r.devices),
            human_seconds(r.weak.seconds),
            f"{r.weak_efficiency:.0%}",
            r.weak.by,
            human_seconds(r.strong.seconds),
            f"{r.strong_efficiency:.0%}",
            r.strong.by,
        )
        for r in report.scaling
    )
    at = takeover(report.scaling)
    island = report.device.island if report.device else None
    lines = [
        "Predicted, none of it measured, by making one mesh axis longer.",
        "Weak: the batch of each device stays. Strong: the global batch stays.",
        f"Communication takes over at {at} devices."
        if at
        else "Communication does not take over (weak scaling).",
    ]
    if island:
        lines.append(f"Beyond {island} devices that axis takes the network.")
    efficiency = " ".join(f"{r.devices}:{r.weak_efficiency:.0%}" for r in report.scaling)
    return Section(
        title="Scaling",
        lines=tuple(lines),
        header=("devices", "weak", "efficiency", "by", "strong", "efficiency", "by"),
        rows=rows,
        left=0,
        pictures=(
            Picture(
                caption="Efficiency: weak blue, strong red",
                text=efficiency,
                svg=scaling_svg(report.scaling),
            ),
        ),
    )


def _places(report: Report, most: int | None) -> Section:
    """The mesh, then each leaf; leaves on which every device holds all are one line."""
    slow = report.slow_axes
    pictures = [
        Picture(
            caption="the mesh",
            text=mesh_text(report.mesh, report.device_ids, slow),
            svg=mesh_svg(report.mesh, report.device_ids, slow),
        )
    ]
    folded = sorted(fold(report.memory.leaves), key=lambda f: -f.leaf.bytes * f.count)
    cut = [f for f in folded if len(f.leaf.holders) > 1]
    for f in cut[:most]:
        spec = f", {f.leaf.spec}" if f.leaf.spec else ""
        pictures.append(
            Picture(
                caption=f"{f.path}: {_shape(f.leaf, f.count)}{spec}, "
                f"{human_bytes(f.leaf.device_bytes)} per device each",
                text=leaf_text(f.leaf),
                svg=leaf_svg(f.leaf),
            )
        )
    lines = []
    if len(cut) > len(pictures) - 1:
        lines.append(f"{len(cut) - len(pictures) + 1} smaller leaves are not shown.")
    whole = [f for f in folded if len(f.leaf.holders) == 1]
    if whole:
        size = sum(f.leaf.device_bytes * f.count for f in whole)
        names = ", ".join(f.path for f in whole[:most])
        more = f" and {len(whole) - most} more" if most and len(whole) > most else ""
        lines.append(f"Whole on every device, {human_bytes(size)}: {names}{more}")
    lines.append("Numbers are positions in the mesh, as in the picture read row by row.")
    return Section(title="Where things live", lines=tuple(lines), pictures=tuple(pictures))
