"""A tree as its arrays, which `jax.jit` sees, and the rest, which it is compiled for."""

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
NUMBERS = (int, float, complex)


def is_array(x: Any) -> bool:
    return isinstance(x, ARRAYS)


def is_number(x: Any) -> bool:
    """Whether a leaf is a Python number; a `bool` is a flag."""
    return isinstance(x, NUMBERS) and not isinstance(x, bool) and not is_array(x)


def is_module(x: Any) -> bool:
    """Whether its numbers are settings, which it reads in Python, and no arrays to be."""
    return isinstance(x, eqx.Module)


def is_array_or_number(x: Any) -> bool:
    return is_array(x) or is_number(x)


def numbers_as_arrays(tree: Any, name: str) -> Any:
    """The tree with its Python numbers as arrays of NumPy, of the dtype that JAX gives them.

    Those of a module stay.
    """
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=is_module)
    where = [i for i, x in enumerate(leaves) if is_number(x)]
    if not where:
        return tree
    problems = []
    for i in where:
        dtype = jnp.result_type(leaves[i])
        try:
            leaves[i] = np.asarray(leaves[i], dtype)
        except OverflowError:
            path, x = jtu.tree_leaves_with_path(tree, is_leaf=is_module)[i]
            problems.append(f"  {name}{jtu.keystr(path)}: {x} is out of the range of {dtype}")
    if problems:
        raise ValueError(
            "These Python numbers cannot be arrays:\n"
            + "\n".join(problems)
            + '\nMake each smaller, or set jax.config.update("jax_enable_x64", True).'
        )
    return jtu.tree_unflatten(treedef, leaves)


def strong(x: Any) -> Any:
    """A traced array without weak type, with which it would be traced for anew."""
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """What remains of a tree without its arrays: its shape and its static leaves."""

    treedef: Any
    positions: tuple[int, ...]
    """Of the arrays, among all leaves."""
    static: tuple[tuple[int, Any], ...]

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash((self.treedef, self.static)))

    def __hash__(self):
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other):
        return self is other or (
            isinstance(other, Structure)
            and self.positions == other.positions
            # 1, 1.0 and True are equal, but not the same program.
            and [type(v) for _, v in self.static] == [type(v) for _, v in other.static]
            and self.static == other.static
            and self.treedef == other.treedef
        )

    def leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """All leaves, in order, with `arrays` in their places."""
        if not self.static:
            return list(arrays)
        out: list[Any] = [None] * (len(self.positions) + len(self.static))
        for i, x in self.static:
            out[i] = x
        for i, x in zip(self.positions, arrays, strict=True):
            out[i] = x
        return out

    def join(self, arrays: Sequence[Any]) -> Any:
        """The tree with `arrays` in it."""
        return jtu.tree_unflatten(self.treedef, self.leaves(arrays))

    def leaf_paths(self) -> list[str]:
        """The path of each leaf."""
        tree = jtu.tree_unflatten(self.treedef, self.leaves(range(len(self.positions))))
        return [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(tree)]

    def paths(self) -> list[str]:
        """The path of each array."""
        paths = self.leaf_paths()
        return [paths[i] for i in self.positions]


class Flat:
    """A pytree that may be kept as its arrays and its structure, and built when looked into.

    `_flat` is `(arrays, structure)`, or `None` once built: then somebody may have changed it.
    """

    __slots__ = ("_flat",)
    _flat: Any


def split(tree: Any, name: str, *, dynamic=is_array, like: Structure | None = None):
    """Splits a tree into `(arrays, structure)`.

    `dynamic` tells which leaves are data. `like`, the structure of the tree before, is
    returned itself if nothing changed, which is much faster than making it again. `name` is
    what the tree is called in the error for a leaf that cannot be compiled for.
    """
    if isinstance(tree, Flat) and tree._flat is not None:
        return tree._flat
    leaves, treedef = jtu.tree_flatten(tree)
    if like is not None and treedef == like.treedef:
        if not like.static:
            if _all(dynamic, leaves):
                return leaves, like
        elif all(
            leaves[i] is x or (type(leaves[i]) is type(x) and leaves[i] == x)
            for i, x in like.static
        ):
            arrays = _pick(leaves, like.positions)
            if _all(dynamic, arrays):
                return arrays, like
    positions = tuple(i for i, x in enumerate(leaves) if dynamic(x))
    found = structure(treedef, positions, leaves, tree, name)
    return [leaves[i] for i in positions], found


def structure(treedef, positions: tuple[int, ...], leaves, tree: Any, name: str) -> Structure:
    """The structure of a tree whose data are the leaves at `positions`."""
    taken = set(positions)
    static = tuple((i, x) for i, x in enumerate(leaves) if i not in taken)
    if any(_arrays_within(x) for _, x in static):
        _refuse_opaque(tree, name)
    try:
        return Structure(treedef, positions, static)
    except TypeError:
        _refuse_unhashable(tree, name, taken)
        raise


def _all(dynamic, leaves) -> bool:
    """Whether every leaf is data, asked once for each type: there may be thousands."""
    return all(map(dynamic, dict(zip(map(type, leaves), leaves, strict=True)).values()))


def _pick(leaves, positions):
    if len(positions) == 1:
        return [leaves[positions[0]]]
    return list(itemgetter(*positions)(leaves)) if positions else []


def _arrays_within(x) -> list[str]:
    """The attributes of a leaf that are arrays of JAX, which JAX itself does not see."""
    if callable(x):
        return []
    return [k for k, v in getattr(x, "__dict__", {}).items() if isinstance(v, jax.Array)]


def _refuse_opaque(tree, name):
    problems = [
        f"  {name}{jtu.keystr(path)}: a {type(x).__name__}, with {', '.join(_arrays_within(x))}"
        for path, x in jtu.tree_leaves_with_path(tree)
        if _arrays_within(x)
    ]
    raise ValueError(
        "JAX does not look into these objects, whose arrays would be constants of the program:"
        "\n" + "\n".join(problems) + "\nMake each class a pytree: an equinox.Module, or "
        "@jax.tree_util.register_dataclass on a dataclass."
    )


def _refuse_unhashable(tree, name, taken):
    problems = []
    for i, (path, x) in enumerate(jtu.tree_leaves_with_path(tree)):
        try:
            hash(x)
        except TypeError:
            if i not in taken:
                problems.append(f"  {name}{jtu.keystr(path)}: a {type(x).__name__}")
    if problems:
        raise ValueError(
            f"{len(problems)} leaves are neither arrays nor hashable, so a program can be "
            "neither given them nor compiled for them:\n"
            + "\n".join(problems)
            + "\nMake each an array, or something hashable such as a tuple or a string."
        )


@jtu.register_pytree_node_class
class Static:
    """A value that rides through `jax.jit` in the structure of a tree."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value, _):
        return cls(value)
