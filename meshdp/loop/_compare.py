"""The description of a saved tree, and what does not fit when it meets another."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _tree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a tree, as a checkpoint describes it."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def leaf(x: Any) -> Leaf:
    return Leaf(tuple(x.shape), str(x.dtype))


def described(structure: _tree.Structure, arrays: Sequence[Any]) -> list[dict[str, Any]]:
    """As JSON: path, global shape, dtype and spec of each array."""
    return [
        {
            "path": path,
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "spec": str(getattr(getattr(x, "sharding", None), "spec", None)),
        }
        for path, x in zip(structure.paths(), arrays, strict=True)
    ]


def read_described(tree: Sequence[Mapping[str, Any]]) -> dict[str, Leaf]:
    return {x["path"]: Leaf(tuple(x["shape"]), x["dtype"]) for x in tree}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Which leaves of a wanted tree a saved one has."""

    fits: tuple[str, ...]
    problems: tuple[str, ...]
    """One line for each leaf that does not fit."""


def compare(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> Comparison:
    """Compares leaf by leaf."""
    fits, problems = [], []
    for path, want in wanted.items():
        have = saved.get(path)
        if have == want:
            fits.append(path)
        elif have is None:
            problems.append(f"  {path}: {want} is missing from the checkpoint")
        else:
            pairs = {"shape": (have.shape, want.shape), "dtype": (have.dtype, want.dtype)}
            other = " and ".join(name for name, (a, b) in pairs.items() if a != b)
            problems.append(
                f"  {path}: {have} in the checkpoint, {want} wanted (other {other})"
            )
    problems += [
        f"  {path}: {have} is only in the checkpoint"
        for path, have in saved.items()
        if path not in wanted
    ]
    return Comparison(tuple(fits), tuple(problems))
