"""What can be wrong with a `PartitionSpec` for a shape on a mesh. Pure: no device."""

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ._follow import Dims, Shape, shape_of
from ._spec import entries, from_entries


def check_specs(shapes: Any, specs: Any, mesh_shape: Mapping[str, int]) -> None:
    """Checks that each array can be split as its spec says.

    **Arguments:**

    - `shapes`: any pytree of things with a global `.shape`; other leaves are not checked.
    - `specs`: a pytree of `P` of the same structure, or a prefix of it (one `P` for all).
    - `mesh_shape`: the size of each mesh axis.

    **Raises:**

    - `ValueError`: one, with every fault of every leaf: an axis the mesh does not have, one
        used twice, more entries than dimensions, a dimension that does not divide by the
        product of its axes, an array without a spec.
    """
    mesh_shape = valid_mesh_shape(mesh_shape)
    spec_leaves, treedef = jtu.tree_flatten(specs, is_leaf=lambda x: x is None)
    try:
        subtrees = treedef.flatten_up_to(shapes)
    except ValueError as e:
        raise ValueError(
            "The specs do not have the structure of the shapes. Give a P for each leaf, or "
            f"one for a whole subtree. JAX says: {e}"
        ) from None
    spread = itertools.chain.from_iterable(
        [spec] * jtu.tree_structure(sub).num_leaves
        for spec, sub in zip(spec_leaves, subtrees, strict=True)
    )
    problems: list[str] = []
    for (path, leaf), spec in zip(jtu.tree_leaves_with_path(shapes), spread, strict=True):
        shape, name = shape_of(leaf), path_str(path) or "(root)"
        if shape is None:
            continue
        if spec is None:
            problems.append(f"{name}: shape {shape} has no spec. Give P() to replicate it.")
        elif not isinstance(spec, P) or not is_plain(spec):
            problems.append(f"{name}: {spec!r} is not a P of axis names and None. Give P(...).")
        else:
            problems += axis_faults(name, spec, mesh_shape)
            problems += size_faults(name, shape, spec, mesh_shape)
    raise_all(problems, f"in the specs {where(mesh_shape)}")


def path_str(path: Sequence[Any]) -> str:
    """A key path of `jax.tree_util` as `by_path` sees it: `.layers[0].weight`, `['w']`."""
    return jtu.keystr(tuple(path))


def axis_faults(name: str, spec: P, mesh_shape: Mapping[str, int]) -> list[str]:
    axes = [axis for dim in entries(spec, len(spec)) for axis in dim]
    faults = []
    for axis in dict.fromkeys(axes):
        if axis not in mesh_shape:
            close = difflib.get_close_matches(axis, mesh_shape, 1)
            fix = f"Did you mean {close[0]!r}?" if close else "Use one of these."
            faults.append(
                f"{name}: {show(spec)} names the axis {axis!r}, but the mesh has "
                f"{', '.join(mesh_shape)}. {fix}"
            )
        if axes.count(axis) > 1:
            faults.append(
                f"{name}: {show(spec)} uses the axis {axis!r} twice. "
                "Split one dimension with it."
            )
    return faults


def size_faults(name: str, shape: Shape, spec: P, mesh_shape) -> list[str]:
    if len(spec) > len(shape):
        fault = (
            f"{name}: {show(spec)} has {count(len(spec), 'entry', 'entries')}, but shape "
            f"{shape} has {count(len(shape), 'dimension')}. "
            f"Remove {count(len(spec) - len(shape), 'entry', 'entries')}."
        )
        return [fault]
    faults = []
    for i, (n, axes) in enumerate(zip(shape, entries(spec, len(shape)), strict=True)):
        parts = math.prod(mesh_shape.get(axis, 1) for axis in axes)
        if n % parts:
            faults.append(
                f"{name}: {show(spec)} splits dimension {i} of shape {shape} over "
                f"{'*'.join(axes)}={parts}, but {n} % {parts} = {n % parts}. "
                f"Pad it to {-(-n // parts) * parts}, split another dimension, "
                "or replicate the leaf."
            )
    return faults


def is_plain(spec: P) -> bool:
    """Whether a spec holds nothing but axis names and `None`."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return False
    return all(
        e is None
        or isinstance(e, str)
        or (type(e) is tuple and all(isinstance(a, str) for a in e))
        for e in spec
    )


def trimmed(spec: P) -> Dims:
    return entries(from_entries(entries(spec, len(spec))), 0)


def show(spec: P) -> str:
    return f"P({', '.join(map(repr, spec))})"


def count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def valid_mesh_shape(mesh_shape: Any) -> dict[str, int]:
    if isinstance(mesh_shape, Mesh):
        raise TypeError("mesh_shape is a Mesh, expected axis sizes. Pass mesh.shape.")
    if not isinstance(mesh_shape, Mapping):
        raise TypeError(
            f"mesh_shape is {mesh_shape!r}, expected a mapping from axis names to sizes. "
            'Pass mesh.shape, or {"data": 2, "fsdp": 4}.'
        )
    wrong = {name: n for name, n in mesh_shape.items() if not isinstance(n, int) or n < 1}
    if wrong:
        raise ValueError(
            f"mesh_shape holds {', '.join(f'{name}={n!r}' for name, n in wrong.items())}; "
            "the size of an axis is a positive integer. make_mesh fills in -1: pass mesh.shape."
        )
    return dict(mesh_shape)


def where(mesh_shape: Mapping[str, int]) -> str:
    used = [f"{name}={size}" for name, size in mesh_shape.items() if size != 1]
    return f"on a mesh of {', '.join(used) or 'one device'}"


def raise_all(problems: list[str], place: str) -> None:
    if problems:
        raise ValueError(
            f"{count(len(problems), 'fault')} {place}:\n"
            + "\n".join(f"  {p}" for p in problems)
        )
