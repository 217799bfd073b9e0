"""The leaves of a tree that are to be placed, where to, and what is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ._layout import check_specs, path_str
from ._tree import is_module, is_number


class Leaves:
    """The leaves of a tree, and which of them are to be placed."""

    def __init__(self, tree: Any, *, numbers: bool = True):
        self.tree = tree
        self.values: list[Any] = []
        self.arrays: list[int] = []
        for top in jtu.tree_leaves(tree, is_leaf=is_module):
            inside = is_module(top)
            for x in jtu.tree_leaves(top) if inside else (top,):
                if is_array(x) or (numbers and not inside and is_number(x)):
                    self.arrays.append(len(self.values))
                self.values.append(x)

    def shape(self, i: int) -> tuple[int, ...]:
        return np.shape(self.values[i])

    def with_rows(self) -> list[int]:
        """The arrays with a leading dimension."""
        return [i for i in self.arrays if self.shape(i)]

    def all_lie(self, where: Sequence[Any]) -> bool:
        """Whether no leaf needs a new array object."""
        for i in self.arrays:
            x, to = self.values[i], where[i]
            if to is not None and not (
                isinstance(x, jax.Array) and x.committed and x.sharding == to
            ):
                return False
        return True

    def names(self) -> list[str]:
        paths = jtu.tree_leaves_with_path(self.tree)
        return [path_str(path) or "(root)" for path, _ in paths]

    def replaced(self, where: Sequence[Any] | None, f: Callable[..., list]) -> Any:
        """The tree with `f(arrays, where, names)` for the arrays that have a place.

        Typed keys are the arrays of their data meanwhile. `names` is a function, as names
        are needed for errors only.
        """
        chosen = [i for i in self.arrays if where is None or where[i] is not None]
        arrays = [self.values[i] for i in chosen]
        try:
            keys = [jax.random.key_impl(x) if _is_key(x) else None for x in arrays]
            for i, key in enumerate(keys):
                arrays[i] = jax.random.key_data(arrays[i]) if key else arrays[i]
            names = lambda: list(map(self.names().__getitem__, chosen))
            out = f(arrays, [where[i] for i in chosen] if where else [], names)
        except (RuntimeError, ValueError):
            self._refuse_deleted()
            raise
        values = list(self.values)
        for i, x, key in zip(chosen, out, keys, strict=True):
            values[i] = jax.random.wrap_key_data(x, impl=key) if key else x
        return jtu.tree_unflatten(jtu.tree_structure(self.tree), values)

    def check(
        self, where: Sequence[Any], shapes: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        """Raises for every leaf that has no value or cannot be split as asked.

        `shapes` are the global shapes of leaves whose own are not.
        """
        self.refuse_valueless(where)
        meshes: dict[Mesh, set[int]] = {}
        for i in self.arrays:
            if isinstance(where[i], NamedSharding):
                meshes.setdefault(where[i].mesh, set()).add(i)
        structure = jtu.tree_structure(self.tree)
        for mesh, members in meshes.items():
            stands_for = [
                jax.ShapeDtypeStruct((shapes or {}).get(i, self.shape(i)), np.float32)
                if i in members
                else False
                for i in range(len(where))
            ]
            specs = [where[i].spec if i in members else P() for i in range(len(where))]
            check_specs(structure.unflatten(stands_for), structure.unflatten(specs), mesh.shape)

    def refuse_valueless(self, where: Sequence[Any] | None = None) -> None:
        problems = []
        for i, x in enumerate(self.values):
            why = None if where and where[i] is None else _why_not(x)
            if why:
                problems.append(f"  {self.names()[i]}: {why}")
        if problems:
            raise TypeError(f"{counted(problems)} cannot be placed:\n" + "\n".join(problems))

    def _refuse_deleted(self) -> None:
        gone = [
            f"  {name}: {x.dtype}{list(x.shape)}"
            for name, x in zip(self.names(), self.values, strict=True)
            if isinstance(x, jax.Array) and x.is_deleted()
        ]
        if gone:
            raise ValueError(
                f"Deleted, or donated to a step: {counted(gone)}:\n"
                + "\n".join(gone)
                + "\nUse what the step returned, or copy before: meshdp.place(tree, shardings)."
            ) from None


def is_array(x: Any) -> bool:
    # float0 is the gradient of an integer: it holds nothing.
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and x.dtype != jax.dtypes.float0


def counted(leaves: Sequence[Any]) -> str:
    return "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _why_not(x: Any) -> str | None:
    """What keeps a leaf from being placed."""
    if isinstance(x, Tracer):
        return "traced by jit, grad or vmap. Use meshdp.constrain inside, and place outside."
    if isinstance(x, jax.ShapeDtypeStruct):
        return "a shape without a value. Make the value: jax.jit(make, out_shardings=...)()."
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array. Fill the gaps, x.filled(0), and pass the mask beside it."
    if isinstance(x, (np.ndarray, np.generic)) and (x.dtype.kind in "OSUMm" or x.dtype.names):
        return f"{x.dtype} is not a dtype of JAX. Turn it into numbers, or take it out."
    return None


def match(shardings: Any, leaves: Leaves) -> list[Any]:
    """For each leaf its sharding, or `None`."""
    if isinstance(shardings, Sharding):
        return [shardings] * len(leaves.values)
    stop = lambda x: x is None or isinstance(x, Sharding)
    flat, prefix = jtu.tree_flatten(shardings, is_leaf=stop)
    wrong = [
        f"  shardings{path_str(path)}: {x!r}"
        for path, x in jtu.tree_leaves_with_path(shardings, is_leaf=stop)
        if not stop(x)
    ]
    if wrong:
        raise TypeError(
            "shardings must consist of NamedShardings and None:\n"
            + "\n".join(wrong)
            + "\nA spec becomes one with a mesh: NamedSharding(mesh, P(...))."
        )
    try:
        below = prefix.flatten_up_to(leaves.tree)
    except ValueError as e:
        raise ValueError(
            "shardings must have the structure of the tree, or end earlier, with one for all "
            f"that is below:\n{_differences(leaves.tree, shardings, stop, str(e))}"
        ) from None
    where: list[Any] = []
    for s, part in zip(flat, below, strict=True):
        where += [s] * jtu.tree_structure(part).num_leaves
    return where


def _differences(tree: Any, shardings: Any, stop: Callable, otherwise: str) -> str:
    """Which leaves have no sharding, and which shardings no leaf; the first 10 of each."""
    below = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    above = [path for path, _ in jtu.tree_leaves_with_path(shardings, is_leaf=stop)]
    ends = set(above)
    starts = {path[:n] for path in below for n in range(len(path) + 1)}
    bare = [p for p in below if not any(p[:n] in ends for n in range(len(p) + 1))]
    idle = [p for p in above if p not in starts]
    lines = [f"  tree{path_str(p)}: no sharding" for p in bare[:10]]
    lines += [f"  ... and {len(bare) - 10} more leaves"] * (len(bare) > 10)
    lines += [f"  shardings{path_str(p)}: no leaf" for p in idle[:10]]
    lines += [f"  ... and {len(idle) - 10} more shardings"] * (len(idle) > 10)
    return "\n".join(lines) or f"  {otherwise}"


def same_specs(leaves: Leaves, mesh: Mesh) -> list[Any]:
    """For each leaf its present spec, on another mesh."""
    where: list[Any] = [None] * len(leaves.values)
    problems = []
    for i in leaves.arrays:
        x = leaves.values[i]
        if np.ndim(x) == 0:
            where[i] = NamedSharding(mesh, P())
        elif isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            where[i] = NamedSharding(mesh, x.sharding.spec)
        else:
            lies = type(x.sharding).__name__ if isinstance(x, jax.Array) else type(x).__name__
            problems.append(f"  {leaves.names()[i]}: shape {np.shape(x)}, {lies}")
    if problems:
        raise ValueError(
            f"Not on a mesh, so without a spec to keep: {counted(problems)}:\n"
            + "\n".join(problems)
            + "\nGive a sharding for each leaf instead of a mesh."
        )
    return where
