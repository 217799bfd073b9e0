"""The arrays of a tree, and which parameter each leaf of optimizer state belongs to."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import jax.tree_util as jtu
import numpy as np
import optax

Shape = tuple[int, ...]
Dims = tuple[tuple[str, ...], ...]  # for each dimension the axes that split it

# What an optimizer state is called where its type does not tell.
_STATE_KEYS = frozenset({".opt_state", "['opt_state']"})


@dataclass(slots=True, eq=False)
class Leaf:
    """An array on its way through a layout."""

    keys: tuple[str, ...]
    shape: Shape
    in_optimizer: bool
    path: str = field(init=False)
    size: int = field(init=False)
    dims: Dims = field(init=False)
    spec: Any = None
    """What the user wrote, as long as `dims` says no more than that."""
    asked: str = ""
    """The kind of part that asked for it to be whole."""
    excused: bool = False
    """It may stay whole though nobody asked."""

    def __post_init__(self):
        self.path = "".join(self.keys)
        self.size = math.prod(self.shape)
        self.dims = ((),) * len(self.shape)

    @property
    def name(self) -> str:
        return self.path or "(root)"


def shape_of(x: Any) -> Shape | None:
    """The shape of an array, or of anything that stands for one; `None` for the rest."""
    shape = getattr(x, "shape", None)
    # A dtype has a shape too.
    return tuple(shape) if isinstance(shape, tuple) and not isinstance(x, np.dtype) else None


def flatten(tree: Any) -> tuple[list[Leaf | None], Any]:
    """The leaves in order, `None` for those that are not arrays, and the tree's structure."""
    leaves: list[Leaf | None] = []

    def add(keys: tuple[str, ...], x: Any, in_optimizer: bool) -> None:
        shape = shape_of(x)
        leaves.append(None if shape is None else Leaf(keys, shape, in_optimizer))

    for path, x in jtu.tree_leaves_with_path(tree, is_leaf=_is_optimizer_state):
        keys = tuple(map(str, path))
        if _is_optimizer_state(x):
            for inner, y in jtu.tree_leaves_with_path(x):
                add((*keys, *map(str, inner)), y, True)
        else:
            add(keys, x, not _STATE_KEYS.isdisjoint(keys))
    return leaves, jtu.tree_structure(tree)


def _is_optimizer_state(x: Any) -> bool:
    # LookaheadParams is optax's too, but holds parameters.
    return type(x).__module__.partition(".")[0] == "optax" and not isinstance(
        x, optax.LookaheadParams
    )


class _Node:
    """A place in the tree of all paths read from their ends."""

    __slots__ = ("children", "first", "others")

    def __init__(self):
        self.children: dict[str, _Node] = {}
        self.first: Leaf | None = None
        self.others: dict[Shape, Leaf] | None = None

    def add(self, leaf: Leaf) -> None:
        if self.first is None:
            self.first = leaf
        elif leaf.shape != self.first.shape:
            # Made only when needed: most nodes hold leaves of one shape, and time goes by
            # the number of objects.
            self.others = self.others or {}
            self.others.setdefault(leaf.shape, leaf)

    def best(self, shape: Shape) -> Leaf | None:
        return self.others.get(shape, self.first) if self.others else self.first


def follow(params: list[Leaf], states: list[Leaf]) -> list[Leaf]:
    """Gives each leaf of `states` the dims of its parameter.

    Returns the leaves whose own shape must decide.
    """
    if not states:
        return []
    root = _Node()
    agreed: dict[Shape, Leaf | None] = {}
    for leaf in params:
        node = root
        for key in reversed(leaf.keys):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
            child.add(leaf)
            node = child
        other = agreed.setdefault(leaf.shape, leaf)
        if other is None or (other.dims, other.asked) != (leaf.dims, leaf.asked):
            agreed[leaf.shape] = None
    undecided = []
    projected: dict[tuple[Shape, Shape, Dims], Dims | None] = {}
    for leaf in states:
        node = root
        for key in reversed(leaf.keys):
            if key not in node.children:
                break
            node = node.children[key]
        param = node.best(leaf.shape)
        if param is None:
            # The parameters may be one bare array, whose path has no end to share.
            param = agreed.get(leaf.shape)
        if param is None:
            undecided.append(leaf)
            continue
        leaf.excused = True
        if param.shape == leaf.shape:
            leaf.dims, leaf.spec = param.dims, param.spec
            continue
        key = (leaf.shape, param.shape, param.dims)
        if key not in projected:
            projected[key] = _project(*key)
        dims = projected[key]
        if dims is None:
            undecided.append(leaf)
        else:
            leaf.dims = dims
    return undecided


def _project(shape: Shape, of: Shape, dims: Dims) -> Dims | None:
    """The dims of `shape`, which is the shape `of` with dimensions removed, set to 1 or added
    in front, or `None` where that is not so or can be read in several ways."""
    if len(shape) > len(of):
        added = len(shape) - len(of)
        return ((),) * added + dims if of and shape[added:] == of else None
    readings = {
        tuple(dims[i] if n == of[i] else () for i, n in zip(kept, shape, strict=True))
        for kept in itertools.combinations(range(len(of)), len(shape))
        if all(n in (of[i], 1) for i, n in zip(kept, shape, strict=True))
    }
    return readings.pop() if len(readings) == 1 else None
