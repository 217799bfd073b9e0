"""Batches: rows over devices, padding, and the rows of one process."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _blocks, _move, _processes
from ._leaves import Leaves, counted
from ._spec import axes_of, entries

Shape = tuple[int, ...]

_agreed: dict[Any, Any] = {}
"""The shapes that all processes last passed, by mesh and structure of the batch."""


def shard(batch: Any, mesh: Mesh, spec: P, share: bool) -> Any:
    """See `meshdp.shard_batch`."""
    axes = _row_axes(mesh, spec)
    leaves = Leaves(batch)
    leaves.refuse_valueless()
    blocks, near = _blocks_here(mesh, axes)
    if near:
        rows = _rows(leaves)
        _refuse_remainder(leaves, rows, axes, mesh, len(blocks), "The batch has")
        where = _where(leaves, {}, mesh, spec)
        return leaves.replaced(where, functools.partial(_move.put, share=share, wait=False))
    count = math.prod(mesh.shape[a] for a in axes)
    _agree(leaves, mesh, axes, blocks)
    shapes = {
        i: (leaves.shape(i)[0] // len(blocks) * count, *leaves.shape(i)[1:])
        for i in leaves.arrays
        if leaves.shape(i) and not _blocks.is_apart(leaves.values[i])
    }
    where = _where(leaves, shapes, mesh, spec)
    own = functools.partial(_put_own_rows, blocks=blocks, count=count, share=share)
    return leaves.replaced(where, own)


def _put_own_rows(
    xs: Sequence[Any],
    to: Sequence[NamedSharding],
    names: Callable[[], list[str]],
    *,
    blocks: tuple[int, ...],
    count: int,
    share: bool,
) -> list[jax.Array]:
    """Global arrays from those rows that lie in `blocks`, of `count` equal ones."""
    there = [i for i, x in enumerate(xs) if _blocks.is_apart(x)]
    out: dict[int, Any] = dict(
        zip(
            there,
            _move.put([xs[i] for i in there], [to[i] for i in there], names, share=share),
            strict=True,
        )
    )
    here = [i for i in range(len(xs)) if i not in out]
    parts = [
        _part(_blocks.own(value), to[i], blocks, count)
        for i, (value, _) in zip(here, _blocks.whole([xs[i] for i in here]), strict=True)
    ]
    out.update(zip(here, _blocks.assemble(parts), strict=True))
    return [out[i] for i in range(len(xs))]


def _part(value: np.ndarray, to: NamedSharding, blocks: tuple[int, ...], count: int):
    """What `_blocks.assemble` takes."""
    if not entries(to.spec, 1)[0]:
        return value.shape, value.dtype, to, value.__getitem__
    size = value.shape[0] // len(blocks)  # rows in a block

    def read(index):
        start, stop, _ = index[0].indices(count * size)
        first = blocks.index(start // size) * size if size else 0
        return value[(slice(first, first + stop - start), *index[1:])]

    return (count * size, *value.shape[1:]), value.dtype, to, read


def local(xs: Sequence[Any], _, names: Callable[[], list[str]]) -> list[np.ndarray]:
    """See `meshdp.local_rows`."""
    found = [_blocks.shards(x) if isinstance(x, jax.Array) else {} for x in xs]
    problems = [
        f"  {names()[i]}: shape {x.shape}, {x.sharding.spec}"
        for i, (x, blocks) in enumerate(zip(xs, found, strict=True))
        if sum(map(_size, blocks)) != _row_count(blocks) * math.prod(x.shape[1:])
    ]
    if problems:
        raise ValueError(
            f"Without whole rows on process {jax.process_index()}: {counted(problems)}:\n"
            + "\n".join(problems)
            + "\nRead them with meshdp.to_host, or meshdp.reshard them to be split along rows "
            "only."
        )
    _blocks.start(found)
    return [
        _read_rows(x, blocks) if isinstance(x, jax.Array) else np.array(x)
        for x, blocks in zip(xs, found, strict=True)
    ]


def _size(bounds) -> int:
    return math.prod(b - a for a, b in bounds)


def _row_count(blocks) -> int:
    return sum(map(_size, {bounds[:1] for bounds in blocks}))


def _read_rows(x: jax.Array, blocks: Mapping[Any, jax.Array]) -> np.ndarray:
    if not x.ndim:
        return np.array(_blocks.view(blocks[()]))
    out = _blocks.empty((_row_count(blocks), *x.shape[1:]), x.dtype)
    first, at = 0, {}
    for a, b in sorted({bounds[0] for bounds in blocks}):
        at[a], first = first, first + b - a
    for ((a, b), *rest), shard in blocks.items():
        out[_blocks.slices([(at[a], at[a] + b - a), *rest])] = _blocks.view(shard)
    return out


def pad(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """See `meshdp.pad_batch`."""
    try:
        valid = not isinstance(multiple, bool) and operator.index(multiple) >= 1
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(
            f"multiple is {multiple!r}, expected the number of devices over which the rows "
            "are split, an integer of at least 1."
        )
    leaves = Leaves(batch)
    rows = _rows(leaves)
    if not rows:
        raise ValueError(
            "The batch has no rows, so there is none to repeat:\n"
            + _list(leaves, leaves.with_rows())
            + "\nLeave the empty batch out."
        )
    mask = np.zeros(rows + -rows % multiple, np.float32)
    mask[:rows] = 1
    if len(mask) == rows:
        return batch, mask
    which = np.minimum(np.arange(len(mask)), rows - 1)
    values = list(leaves.values)
    for i in leaves.with_rows():
        values[i] = values[i][which]
    return jtu.tree_unflatten(jtu.tree_structure(batch), values), mask


def _row_axes(mesh: Mesh, spec: P) -> tuple[str, ...]:
    """The mesh axes over which rows are split."""
    if not isinstance(spec, P):
        raise TypeError(
            f"spec is {spec!r}, expected a PartitionSpec whose first entry splits the rows, "
            'such as P(("data", "fsdp")).'
        )
    unknown = sorted(axes_of(spec) - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"spec {spec} names {', '.join(map(repr, unknown))}, but the axes of the mesh are "
            f"{', '.join(map(repr, mesh.axis_names))}. Name those that split the rows: "
            f"shard_batch(batch, mesh, P({mesh.axis_names[0]!r}))."
        )
    return entries(spec, 1)[0]


@functools.lru_cache(maxsize=64)
def _blocks_here(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
    """Which of the equal blocks of rows lie on this process, and whether all devices do."""
    count = math.prod(mesh.shape[a] for a in axes)
    sharding = NamedSharding(mesh, P(axes or None))
    indices = sharding.addressable_devices_indices_map((count,)).values()
    here = tuple(sorted({index[0].indices(count)[0] for index in indices if index}))
    if not here:
        raise ValueError(
            f"Process {jax.process_index()} has no device in the mesh, so it has no rows. "
            "Call shard_batch on the processes of the mesh only."
        )
    return here, sharding.is_fully_addressable


def _where(leaves: Leaves, shapes: Mapping[int, Shape], mesh: Mesh, spec: P) -> list[Any]:
    made: dict[int, NamedSharding] = {}
    where: list[Any] = [None] * len(leaves.values)
    for i in leaves.arrays:
        n = min(len(leaves.shape(i)), len(spec))
        if n not in made:
            made[n] = NamedSharding(mesh, P(*spec[:n]))
        where[i] = made[n]
    if len(spec) > 1:
        leaves.check(where, shapes)
    return where


def _rows(leaves: Leaves) -> int:
    """The number of rows that all leaves on this process have."""
    members = [i for i in leaves.with_rows() if not _blocks.is_apart(leaves.values[i])]
    if not members:
        if leaves.with_rows():
            return 0  # all are global already
        raise ValueError(
            "The batch has no leaf with rows, so there is nothing to split:\n"
            + (_list(leaves, leaves.arrays) or "  it has no arrays")
            + "\nGive leaves a leading dimension, one row for each example, or replicate them "
            "with meshdp.place."
        )
    if len({leaves.shape(i)[0] for i in members}) > 1:
        raise ValueError(
            "The leaves of the batch disagree about the number of rows, their leading "
            f"dimension:\n{_list(leaves, members)}\n"
            "Give all the same number; what is not one per example can be a scalar, or be "
            "replicated with meshdp.place."
        )
    return leaves.shape(members[0])[0]


def _list(leaves: Leaves, members: Sequence[int]) -> str:
    names = leaves.names()
    return "\n".join(f"  {names[i]}: shape {leaves.shape(i)}" for i in members)


def _refuse_remainder(
    leaves: Leaves, rows: int, axes: Sequence[str], mesh: Mesh, parts: int, who: str
) -> None:
    rest = rows % parts
    if not rest:
        return
    over = f"{'*'.join(axes)}={math.prod(mesh.shape[a] for a in axes)}"
    if who != "The batch has":
        over = f"the {parts} parts of {over} that it holds"
    raise ValueError(
        f"{who} {rows} rows, which do not divide over {over}: {rows} % {parts} = {rest}.\n"
        f"{_list(leaves, leaves.with_rows())}\n"
        f"Add {parts - rest}, leave out {rest}, or pad and mask: "
        f"batch, mask = meshdp.pad_batch(batch, {parts})"
    )


def _agree(leaves: Leaves, mesh: Mesh, axes: Sequence[str], blocks: Sequence[int]) -> None:
    """Raises unless all processes pass batches that fit together."""
    me = jax.process_index()
    processes = _processes.processes_of(NamedSharding(mesh, P()))
    try:
        rows = _rows(leaves)
        _refuse_remainder(leaves, rows, axes, mesh, len(blocks), f"Process {me} passed")
    except ValueError as e:
        # The others raise as well then, instead of waiting for this one.
        _processes.say("shard_batch", processes, {"fault": str(e).partition("\n")[0]})
        raise
    members = [i for i in leaves.with_rows() if not _blocks.is_apart(leaves.values[i])]
    shapes = [leaves.shape(i) for i in members]
    dtypes = [str(leaves.values[i].dtype) for i in members]
    # What must be equal is the rows per block: a process may hold more blocks than another.
    fits = [(n // len(blocks), *tail, d) for (n, *tail), d in zip(shapes, dtypes, strict=True)]
    key = (mesh, tuple(axes), jtu.tree_structure(leaves.tree))
    if _agreed.get(key) == fits:
        return
    mine = [
        [str(f), f"shape {shape} of {d}"]
        for f, shape, d in zip(fits, shapes, dtypes, strict=True)
    ]
    names = lambda: list(map(leaves.names().__getitem__, members))
    faults = _processes.disagreements("shard_batch", processes, mine, names)
    if faults:
        raise ValueError(
            "The processes passed batches that do not fit together:\n"
            + "\n".join(faults)
            + "\nOn every process pass the same leaves, and as many rows per device as on the "
            "others. At the end of the data pad on all: meshdp.pad_batch."
        )
    _agreed[key] = fits
