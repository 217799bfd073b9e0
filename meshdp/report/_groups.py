"""Who talks to whom: replica groups and permute pairs, and the mesh axes they span."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshdp.report._hlo_text import Instruction, Module

_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*(?:\([^)]*\))?[^)]*)\))? "
    r"\{(?P<named>[^}]*)\}"
)
_COUNT = r"\[(?P<of>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\]<=" + _COUNT)
_AXIS = re.compile(r"""['"]?(?P<name>[^'"=,:]+)['"]?(?::\((?P<pre>\d+)\)(?P<size>\d+))?""")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _count(found: re.Match) -> np.ndarray:
    """`[2,4]T(1,0)`: count up over [2,4], transpose, read off."""
    of = _numbers(found["of"])
    ids = np.arange(np.prod(of, dtype=int)).reshape(of)
    return ids.transpose(_numbers(found["order"])).ravel() if found["order"] else ids.ravel()


def parse_groups(text: str, everyone: int) -> list[list[int]]:
    """Reads the value of `replica_groups` in each of XLA's spellings.

    - `{{0,1},{2,3}}`; `{}` means everyone together, `everyone` being how many that is
    - `[2,4]<=[4,2]T(1,0)`: rows of a transposed count
    - `mesh['data'=2,'tensor'=4] {'data'}`: axes of a mesh, perhaps a part of one
      (`'tensor':(2)2` is the factor 2 that comes after a factor of 2), perhaps with the
      devices in another order, `device_ids=(0,2,1,3)` or `device_ids=([2,2]T(1,0))`

    **Raises:**

    - `ValueError`: if the spelling is none of these.
    """
    text = text.strip()
    if found := _MESH.match(text):
        return _mesh_groups(found)
    if found := _IOTA.match(text):
        return _count(found).reshape(_numbers(found["shape"])).tolist()
    if text in ("", "{}"):
        return [list(range(everyone))]
    if re.fullmatch(r"\{[\d,{} ]*\}", text):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", text)]
    raise ValueError(
        f"Cannot read these replica groups: {text!r}. Expected {{{{0,1}},{{2,3}}}}, "
        "[2,2]<=[4] or mesh['data'=2] {'data'}. Please report it with the XLA version."
    )


def _mesh_groups(found: re.Match) -> list[list[int]]:
    sizes: dict[str, int] = {}
    for part in found["axes"].split(","):
        name, _, size = part.rpartition("=")
        sizes[name.strip("'\" ")] = int(size)
    ids = np.arange(np.prod([*sizes.values()], dtype=int))
    if found["ids"]:
        count = re.match(_COUNT, found["ids"])
        ids = _count(count) if count else np.array(_numbers(found["ids"]))
    # Each axis is cut into (before, size, after), so that a part of an axis is a dimension
    # of its own.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    wanted: list[tuple[str, int, int]] = []
    for axis in _AXIS.finditer(found["named"]):
        name = axis["name"].strip()
        before = int(axis["pre"] or 1)
        after = before * int(axis["size"] or sizes[name])
        cuts[name] |= {before, after}
        wanted.append((name, before, after))
    shape: list[int] = []
    where: dict[tuple[str, int], int] = {}
    for name, at in cuts.items():
        edges = sorted(at)
        for low, high in zip(edges, edges[1:], strict=False):
            where[name, low] = len(shape)
            shape.append(high // low)
    inside = [
        d
        for name, before, after in wanted
        for (n, low), d in where.items()
        if n == name and before <= low < after
    ]
    outside = [d for d in range(len(shape)) if d not in inside]
    grouped = ids.reshape(shape).transpose(outside + inside)
    size = int(np.prod([shape[d] for d in inside], dtype=int))
    return grouped.reshape(-1, size).tolist()


def groups(module: Module, op: Instruction) -> list[list[int]]:
    """The groups of a collective, as positions in the device assignment.

    Replica *r*, partition *p* is at position `r * num_partitions + p`. What the numbers of
    `replica_groups` mean depends on `channel_id` and `use_global_device_ids` (XLA's
    `CollectiveOpGroupMode`).
    """
    replicas, partitions = module.num_replicas, module.num_partitions
    channel = "channel_id=" in op.rest
    text = _groups_text(op)
    if "use_global_device_ids=true" in op.rest:
        return parse_groups(text, replicas * partitions)
    by_partition = channel and op.opcode.removesuffix("-start") in (
        "all-to-all",
        "ragged-all-to-all",
        "collective-broadcast",
        "collective-permute",
    )
    if by_partition:
        parsed = parse_groups(text, partitions)
        return [[r * partitions + p for p in g] for r in range(replicas) for g in parsed]
    parsed = parse_groups(text, replicas)
    if channel:  # Those replicas, and all the partitions of each.
        return [[r * partitions + p for r in g for p in range(partitions)] for g in parsed]
    return [[r * partitions + p for r in g] for p in range(partitions) for g in parsed]


def _groups_text(op: Instruction) -> str:
    start = op.rest.find("replica_groups=")
    if start < 0:
        return "{}"
    text = op.rest[start + len("replica_groups=") :]
    if found := _MESH.match(text):
        return found[0]
    return op.attribute("replica_groups")


def pairs(module: Module, op: Instruction) -> list[list[int]]:
    """The (source, target) pairs of a permute, as positions; idle self-pairs left out."""
    numbers = _numbers(op.attribute("source_target_pairs"))
    found = [list(p) for p in zip(numbers[::2], numbers[1::2], strict=True) if p[0] != p[1]]
    partitions = module.num_partitions
    if "channel_id=" in op.rest:
        return [
            [r * partitions + i for i in p] for r in range(module.num_replicas) for p in found
        ]
    return [[i * partitions + k for i in p] for p in found for k in range(partitions)]


def axes_of(together: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of one group differ, in mesh order.

    `together`: groups of positions in a mesh of these `sizes`, counted with the last axis
    fastest. An axis of size 1 is never named.
    """
    names = tuple(sizes)
    shape = tuple(sizes.values())
    differs = np.zeros(len(names), dtype=bool)
    by_length: dict[int, list[Sequence[int]]] = {}
    for group in together:
        by_length.setdefault(len(group), []).append(group)
    for length, same in by_length.items():
        if length > 1:
            # [axis, group, member]
            at = np.stack(np.unravel_index(np.asarray(same), shape))
            differs |= (at != at[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, d in zip(names, differs, strict=True) if d)
