"""Layouts: rules from (path, shape) to `PartitionSpec`. Pure: no mesh, no device."""

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec as P

from ._check import (
    axis_faults,
    is_plain,
    raise_all,
    show,
    size_faults,
    trimmed,
    valid_mesh_shape,
    where,
)
from ._check import check_specs as check_specs
from ._check import path_str as path_str
from ._follow import Dims, Leaf, Shape, flatten, follow
from ._spec import entries, from_entries

LARGE = 2**16
"""A leaf of so many elements or more may not stay whole by accident, if no `fsdp` says
otherwise: 256 KiB in float32."""


@dataclass(frozen=True, repr=False)
class Layout:
    """A rule from the path and shape of a leaf to its `PartitionSpec`.

    Made by `replicate`, `fsdp` and `by_path`, and composed with `|`: in `a | b`, `b` refines
    what `a` said. It may split dimensions that are not split yet, and undoes nothing. Layouts
    can be hashed and compared. `specs` applies one to a tree.
    """

    _parts: tuple["_Replicate | _Fsdp | _ByPath", ...]

    def __or__(self, other: "Layout") -> "Layout":
        if not isinstance(other, Layout):
            return NotImplemented
        return Layout(self._parts + other._parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._parts))


def replicate() -> Layout:
    """Asks for every leaf that is not split yet to be whole on every device.

    Alone, all is replicated. `replicate() | fsdp()` is the same: what was asked for stays.
    `fsdp() | replicate()` splits what can be split and accepts that the rest is whole, however
    large.
    """
    return Layout((_Replicate(),))


def fsdp(min_size: int = LARGE) -> Layout:
    """Splits each leaf over the axis `fsdp`, along the largest dimension that is free.

    A dimension is free if no axis splits it yet and its size divides by the size of the axis.
    Of equally large dimensions the first is taken. Left alone are leaves that use `fsdp`
    already, that were asked to be whole, or that have fewer than `min_size` elements: it costs
    more time to gather them than it saves memory. A larger leaf that ends whole because no
    dimension divides is a fault (see `specs`): pad it, or ask for it with `P()` or
    `| replicate()`.

    **Arguments:**

    - `min_size`: in elements of the global shape.

    **Raises:**

    - `ValueError`: if `min_size` is not an integer of at least 0.
    """
    try:
        size = -1 if isinstance(min_size, bool) else operator.index(min_size)
    except TypeError:
        size = -1
    if size < 0:
        raise ValueError(
            f"fsdp(min_size={min_size!r}): expected a number of elements, an integer of at "
            "least 0. Use 0 to split every leaf that can be split."
        )
    return Layout((_Fsdp(size),))


def by_path(rules: Mapping[str, P]) -> Layout:
    r"""States the specs of leaves by their paths.

    ```python
    by_path({r"mlp\.up\.weight": P("tensor"), r"norm": P()}) | fsdp()
    ```

    A path is that of `jax.tree_util.keystr`, such as `.layers[0].weight` or `['w']`; a regex
    applies where `re.search` finds it. `P()` asks for a leaf to be whole: no later part of
    the layout splits it. In any other spec `None`, written or left out at the end, is a
    dimension left free for later parts: `P(None, "tensor") | fsdp()` may become
    `P("fsdp", "tensor")`, and `P(None)` names a leaf and leaves it all free.

    The regexes apply to parameters; optimizer state follows them (see `specs`).

    **Raises:**

    - `ValueError`: every regex that cannot be compiled, every value that is not a
        `PartitionSpec` of axis names and `None`.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"by_path takes a mapping from regexes to PartitionSpecs, not {rules!r}. "
            'Write by_path({"weight": P("tensor")}).'
        )
    problems = []
    for regex, spec in rules.items():
        try:
            re.compile(regex)
        except (re.error, TypeError) as e:
            problems.append(f"{regex!r} is not a regex: {e}. Escape it with re.escape.")
        if not isinstance(spec, P):
            problems.append(
                f"{regex!r}: {spec!r} is not a PartitionSpec. Write P(...) with axis names."
            )
        elif not is_plain(spec):
            problems.append(
                f"{regex!r}: {spec!r} holds more than axis names and None. Use only these: "
                "a layout says where arrays are stored."
            )
    raise_all(problems, "in by_path")
    return Layout((_ByPath(tuple(rules.items())),))


def specs(shapes: Any, layout: Layout, mesh_shape: Mapping[str, int]) -> Any:
    """Gives each leaf of a tree its `PartitionSpec`.

    Optimizer state is whatever lies inside a state of optax, or under a field or key named
    `opt_state`. Each of its leaves follows its parameter, which is the leaf outside with the
    longest common end of the path: of the same shape, it gets the same spec; of the
    parameter's shape with dimensions removed, set to 1 or added in front, it gets the spec
    with the same done to it. Where that is ambiguous, or there is no parameter, the `fsdp`
    and `replicate` parts of the layout apply to its own shape. Scalars are replicated.

    **Arguments:**

    - `shapes`: any pytree: of arrays, of `jax.ShapeDtypeStruct`s, with global shapes. The
        shape of typed PRNG keys is that of the array of keys.
    - `layout`: what to do.
    - `mesh_shape`: the size of each mesh axis, such as `mesh.shape` or `{"fsdp": 4096}`.

    **Returns:**

    `shapes` with a `P` in place of each array, and `None` in place of each other leaf. As
    `None` is an empty pytree to JAX, map over both with the shapes first:
    `jax.tree.map(f, shapes, specs)` calls `f(leaf, None)` for leaves that are not arrays.

    **Raises:**

    - `ValueError`: one, with every fault: a regex that matches no parameter; two that give
        one leaf different specs; a spec that names an unknown axis or one axis twice, has
        more entries than the leaf has dimensions, contradicts an earlier part of the layout
        or does not divide a dimension; a leaf of at least `min_size` elements (`2**16` if the
        layout has no `fsdp`) that stays whole on a mesh with `fsdp` > 1 though nobody asked.
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is {layout!r}, expected a Layout. "
            'Use fsdp(), replicate() or by_path({"regex": P(...)}), composed with `|`.'
        )
    mesh_shape = valid_mesh_shape(mesh_shape)
    found, treedef = flatten(shapes)
    arrays = [leaf for leaf in found if leaf is not None]
    params = [leaf for leaf in arrays if not leaf.in_optimizer]
    problems: list[str] = []
    for part in layout._parts:
        part.refine(params, mesh_shape, problems)
    orphans = follow(params, [leaf for leaf in arrays if leaf.in_optimizer])
    for part in layout._parts:
        if not isinstance(part, _ByPath):
            part.refine(orphans, mesh_shape, problems)
    _find_replicated(params + orphans, layout, mesh_shape, problems)
    raise_all(list(dict.fromkeys(problems)), f"in the layout {where(mesh_shape)}")
    made: dict[Any, P] = {}
    out = []
    for leaf in found:
        if leaf is None:
            out.append(None)
            continue
        key = leaf.spec or leaf.dims
        if key not in made:
            made[key] = leaf.spec or from_entries(leaf.dims)
        out.append(made[key])
    return jtu.tree_unflatten(treedef, out)


@dataclass(frozen=True)
class _Replicate:
    def __repr__(self) -> str:
        return "replicate()"

    def refine(self, leaves: list[Leaf], mesh_shape, problems) -> None:
        for leaf in leaves:
            if not any(leaf.dims) and not leaf.asked:
                leaf.asked = "replicate"


@dataclass(frozen=True)
class _Fsdp:
    min_size: int

    def __repr__(self) -> str:
        return f"fsdp(min_size={self.min_size})"

    def refine(self, leaves: list[Leaf], mesh_shape, problems) -> None:
        if "fsdp" not in mesh_shape:
            problems.append(
                "fsdp() splits over the axis 'fsdp', but the mesh has only "
                f"{', '.join(mesh_shape)}. Name an axis 'fsdp', or use by_path."
            )
            return
        devices = mesh_shape["fsdp"]
        if devices == 1:
            return
        chosen: dict[tuple[Shape, Dims], Dims] = {}
        for leaf in leaves:
            if leaf.asked or leaf.size < max(self.min_size, 1):
                continue
            key = (leaf.shape, leaf.dims)
            if key not in chosen:
                chosen[key] = _split_largest(*key, devices)
            if chosen[key] != leaf.dims:
                leaf.dims, leaf.spec = chosen[key], None


def _split_largest(shape: Shape, dims: Dims, devices: int) -> Dims:
    if any("fsdp" in axes for axes in dims):
        return dims
    free = [i for i, n in enumerate(shape) if not dims[i] and n % devices == 0]
    if not free:
        return dims
    best = max(free, key=lambda i: shape[i])
    return (*dims[:best], ("fsdp",), *dims[best + 1 :])


@dataclass(frozen=True)
class _ByPath:
    rules: tuple[tuple[str, P], ...]

    def __repr__(self) -> str:
        return f"by_path({{{', '.join(f'{r!r}: {show(s)}' for r, s in self.rules)}}})"

    def refine(self, leaves: list[Leaf], mesh_shape, problems) -> None:
        unused = {regex for regex, _ in self.rules}
        bad = set()
        for regex, spec in self.rules:
            faults = axis_faults(repr(regex), spec, mesh_shape)
            problems += faults
            bad |= {regex} if faults else set()
        compiled = [(re.compile(regex).search, regex, spec) for regex, spec in self.rules]
        for leaf in leaves:
            path = leaf.path
            hits = [(regex, spec) for search, regex, spec in compiled if search(path)]
            if not hits:
                continue
            unused.difference_update(regex for regex, _ in hits)
            fault = _disagreement(hits, leaf)
            if fault is None and not any(regex in bad for regex, _ in hits):
                fault = _refine_one(leaf, *hits[0], mesh_shape)
            if fault:
                problems.extend(fault)
            if fault or any(regex in bad for regex, _ in hits):
                leaf.excused = True  # reported already
        if leaves:
            where = f"paths are like {', '.join(leaf.name for leaf in leaves[:3])}"
        else:
            where = "the tree has no array outside of optimizer state"
        for regex in [regex for regex, _ in self.rules if regex in unused]:
            problems.append(f"{regex!r} matches no parameter. Correct or remove it; {where}.")


def _disagreement(hits: list[tuple[str, P]], leaf: Leaf) -> list[str] | None:
    if len(hits) == 1:
        return None
    distinct = {(trimmed(spec), spec == P()): (regex, spec) for regex, spec in hits[::-1]}
    if len(distinct) == 1:
        return None
    said = " and ".join(f"{regex!r} gives {show(spec)}" for regex, spec in hits)
    return [f"{leaf.name}: {said}. Make the regexes exclude each other."]


def _refine_one(leaf: Leaf, regex: str, spec: P, mesh_shape) -> list[str]:
    """Adds the entries of `spec` to what the leaf has. Returns the faults, if any."""
    name = leaf.name
    faults = size_faults(name, leaf.shape, spec, mesh_shape)
    if faults:
        return faults
    new = entries(spec, len(leaf.shape))
    merged = tuple(a or b for a, b in zip(leaf.dims, new, strict=True))
    used = [axis for axes in merged for axis in axes]
    contradicts = (
        any(a and b and a != b for a, b in zip(leaf.dims, new, strict=True))
        or len(used) != len(set(used))
        or (spec == P() and any(leaf.dims))
        or (leaf.asked == "by_path" and any(new))
    )
    if contradicts:
        fault = (
            f"{name}: {regex!r} gives {show(spec)}, but an earlier part of the layout gave "
            f"{show(from_entries(leaf.dims))}. Put by_path before fsdp; say each thing once."
        )
        return [fault]
    if spec == P():
        leaf.asked = "by_path"
    elif any(new):
        leaf.asked = ""
    if merged != leaf.dims:
        leaf.spec = spec if merged == new else None
        leaf.dims = merged
    return []


def _find_replicated(leaves: list[Leaf], layout: Layout, mesh_shape, problems) -> None:
    devices = mesh_shape.get("fsdp", 1)
    if devices == 1:
        return
    sizes = [part.min_size for part in layout._parts if isinstance(part, _Fsdp)]
    threshold = max(min(sizes, default=LARGE), 2)  # one element cannot be split
    for leaf in leaves:
        if leaf.asked or leaf.excused or leaf.size < threshold:
            continue
        if math.prod(mesh_shape[axis] for axes in leaf.dims for axis in axes) > 1:
            continue
        if any(leaf.dims):
            why = f"{show(from_entries(leaf.dims))} splits it over axes of size 1 only"
            why += f", and no other dimension divides by fsdp={devices}" if sizes else ""
            fix = "Add 'fsdp' to the spec"
        elif not sizes:
            why, fix = "no part of the layout splits it", "Add `| fsdp()`"
        else:
            why, fix = f"no dimension divides by fsdp={devices}", "Pad a dimension"
        if leaf.in_optimizer:
            ask = "`| replicate()`"
        else:
            ask = f'by_path({{r"{re.escape(leaf.path)}$": P()}}) or `| replicate()`'
        problems.append(
            f"{leaf.name}: shape {leaf.shape} would be whole on every device: {why}. "
            f"{fix}, or ask for it to be whole with {ask}."
        )
