"""Pictures, as text and as SVG: who holds what, the mesh, the scaling curve."""

import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence

from meshdp.report._memory import Leaf
from meshdp.report._time import Scaled


@dataclasses.dataclass(frozen=True)
class Folded:
    """Leaves that are alike but for the numbers in their paths, such as stacked layers."""

    path: str
    leaf: Leaf
    count: int


def fold(leaves: Sequence[Leaf]) -> tuple[Folded, ...]:
    """Folds `blocks[0].w`, `blocks[1].w`, ... of one shape and layout into `blocks[0..1].w`.

    Only one number of a path may differ; leaves that stand alone stay as they are.
    """
    alike: dict[tuple, list[Leaf]] = {}
    for leaf in leaves:
        shape = (re.sub(r"\d+", "#", leaf.path), leaf.shape, leaf.dtype, leaf.tiles)
        alike.setdefault((*shape, leaf.holders, leaf.role), []).append(leaf)
    found = []
    for same in alike.values():
        numbers = [re.findall(r"\d+", leaf.path) for leaf in same]
        differ = [k for k in range(len(numbers[0])) if len({n[k] for n in numbers}) > 1]
        if len(differ) != 1:
            found += [Folded(leaf.path, leaf, 1) for leaf in same]
            continue
        values = sorted(int(n[differ[0]]) for n in numbers)
        at = [m.span() for m in re.finditer(r"\d+", same[0].path)][differ[0]]
        span = f"{values[0]}..{values[-1]}"
        path = same[0].path[: at[0]] + span + same[0].path[at[1] :]
        found.append(Folded(path, same[0], len(same)))
    return tuple(found)


def holders_text(held: Sequence[int]) -> str:
    """`0-3,6`: device numbers with runs shortened."""
    runs: list[list[int]] = []
    for n in held:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _grid(leaf: Leaf) -> tuple[int, int]:
    """Rows and columns of the picture: the last split dimension runs across."""
    split = [t for t in leaf.tiles if t > 1]
    if not split:
        return 1, 1
    if len(split) == 1:
        # One split dimension: down, or across if it is the last of the array.
        across = leaf.tiles[-1] > 1 and len(leaf.tiles) > 1
        return (1, split[0]) if across else (split[0], 1)
    return math.prod(split[:-1]), split[-1]


def leaf_text(leaf: Leaf, most: int = 64) -> str:
    """A box for each piece with the numbers of the devices that hold it."""
    rows, columns = _grid(leaf)
    if rows * columns > most:
        return f"{rows * columns} pieces; the first on {holders_text(leaf.holders[0])}"
    cells = [holders_text(h) for h in leaf.holders]
    width = max(len(c) for c in cells) + 2
    line = "+" + "+".join(["-" * width] * columns) + "+"
    out = [line]
    for r in range(rows):
        row = cells[r * columns : (r + 1) * columns]
        out += ["|" + "|".join(c.center(width) for c in row) + "|", line]
    return "\n".join(out)


def _svg(width: float, height: float, body: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label)}" '
        f'style="max-width:{width:g}px">{"".join(body)}</svg>'
    )


def leaf_svg(leaf: Leaf, size: int = 180) -> str:
    """The same as an SVG; pieces held by the same devices have the same colour."""
    rows, columns = _grid(leaf)
    if rows * columns > 256:
        return ""
    w, h = size / columns, max(24.0, min(size, 40 * rows) / rows)
    kinds = {held: k for k, held in enumerate(dict.fromkeys(leaf.holders))}
    body = []
    for number, held in enumerate(leaf.holders):
        x, y = number % columns * w, number // columns * h
        hue = kinds[held] * 360 // max(1, len(kinds))
        text = holders_text(held)
        body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="hsl({hue} 60% 55% / .45)" class="edge"><title>devices {text}</title></rect>'
        )
        if len(text) * 6.5 < w:
            body.append(
                f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" '
                f'text-anchor="middle">{text}</text>'
            )
    return _svg(size, h * rows, body, f"{leaf.path}: who holds what")


def _mesh_grid(sizes: Mapping[str, int]) -> tuple[list[str], list[str], int, int]:
    """Axes that run down, axes that run across, and how many each way."""
    names = [a for a, n in sizes.items() if n > 1] or list(sizes)[:1]
    down, across = names[:-1], names[-1:]
    if len(names) > 2:
        down, across = names[: len(names) // 2], names[len(names) // 2 :]
    rows, columns = (math.prod(sizes[a] for a in group) for group in (down, across))
    return down, across, rows, columns


def mesh_text(sizes: Mapping[str, int], ids: Sequence[int], slow: Sequence[str] = ()) -> str:
    """The mesh as a grid of device ids: the last axes run across, the first ones down."""
    down, across, rows, columns = _mesh_grid(sizes)
    name = lambda axes: " x ".join(f"{a}={sizes[a]}" for a in axes) or "one row"
    lines = [f"down: {name(down)}; across: {name(across)}"]
    if slow:
        lines[0] += f"; over the network: {', '.join(slow)}"
    width = max((len(str(i)) for i in ids), default=1)
    for r in range(min(rows, 32)):
        row = ids[r * columns : (r + 1) * columns]
        lines.append(" ".join(str(i).rjust(width) for i in row[:64]))
    if rows > 32 or columns > 64:
        lines.append(f"({rows} x {columns} in all)")
    return "\n".join(lines)


def mesh_svg(sizes: Mapping[str, int], ids: Sequence[int], slow: Sequence[str] = ()) -> str:
    """Devices as boxes, each axis' rings as lines of its own colour; the network dashed."""
    down, across, rows, columns = _mesh_grid(sizes)
    if rows * columns > 256:
        return ""
    step, box, top = 62, 30, 26
    place = lambda k: (k % columns * step + 28, k // columns * step + top + 26)
    shape = list(sizes.values())
    body = []
    legend_x = 4.0
    for number, axis in enumerate(a for a in sizes if sizes[a] > 1):
        hue = number * 67 % 360
        dash = ' stroke-dasharray="4 3"' if axis in slow else ""
        line = f'stroke="hsl({hue} 65% 50%)" stroke-width="2.5" fill="none"{dash}'
        stride = math.prod(shape[list(sizes).index(axis) + 1 :])
        for k in range(len(ids)):
            if k // stride % sizes[axis] == sizes[axis] - 1:
                continue
            (x0, y0), (x1, y1) = place(k), place(k + stride)
            # Links that jump over a neighbour bow out, so that they stay visible.
            bow = 18 if stride > 1 and axis in across or stride > columns else 0
            mid = (
                (x0 + x1) / 2 + (bow if x0 == x1 else 0),
                (y0 + y1) / 2 - (bow if y0 == y1 else 0),
            )
            body.append(
                f'<path d="M{x0} {y0} Q{mid[0]:g} {mid[1]:g} {x1} {y1}" {line}>'
                f"<title>{html.escape(axis)}</title></path>"
            )
        word = f"{axis}={sizes[axis]}"
        body.append(f'<path d="M{legend_x:g} 10 h18" {line}/>')
        body.append(f'<text x="{legend_x + 22:g}" y="14">{html.escape(word)}</text>')
        legend_x += 36 + 7.5 * len(word)
    for k, device in enumerate(ids):
        x, y = place(k)
        body.append(
            f'<rect x="{x - box / 2:g}" y="{y - box / 2:g}" width="{box}" height="{box}" '
            f'rx="5" class="device"/>'
            f'<text x="{x}" y="{y + 4}" text-anchor="middle">{device}</text>'
        )
    width = max(columns * step, legend_x)
    return _svg(width, rows * step + top + 6, body, "the mesh and its links")


def scaling_svg(rows: Sequence[Scaled]) -> str:
    """Efficiency over the number of devices, both axes as read from left to right."""
    if len(rows) < 2:
        return ""
    width, height, left, bottom = 420, 200, 40, 28
    logs = [math.log2(r.devices) for r in rows]
    span = (logs[-1] - logs[0]) or 1
    top = max(1.0, *(r.weak_efficiency for r in rows), *(r.strong_efficiency for r in rows))
    x = lambda k: left + (logs[k] - logs[0]) / span * (width - left - 14)
    y = lambda v: height - bottom - v / top * (height - bottom - 12)
    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        body.append(f'<path class="grid" d="M{left} {y(share):.1f} H{width - 14}"/>')
        body.append(
            f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    for k, row in enumerate(rows):
        body.append(
            f'<text x="{x(k):.1f}" y="{height - 8}" text-anchor="middle">{row.devices}</text>'
        )
    for name, hue in (("weak", 210), ("strong", 20)):
        values = [getattr(r, f"{name}_efficiency") for r in rows]
        points = " ".join(f"{x(k):.1f},{y(v):.1f}" for k, v in enumerate(values))
        body.append(
            f'<polyline points="{points}" fill="none" stroke="hsl({hue} 75% 50%)" '
            f'stroke-width="2.5"><title>{name} scaling</title></polyline>'
        )
    return _svg(width, height, body, "predicted efficiency over the number of devices")
