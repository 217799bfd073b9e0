"""Which dimension of which leaf is mapped; errors that name the argument.

Here an axis of `pmap` is an int, or `UNMAPPED` where the user wrote `None`: `None` would
vanish from a pytree.
"""

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec as P

UNMAPPED = "unmapped"


def spell(axes: Any, what: str) -> Any:
    """Checks `in_axes` or `out_axes` and writes `UNMAPPED` for `None`."""

    def one(axis: Any) -> Any:
        if axis is None:
            return UNMAPPED
        try:
            assert not isinstance(axis, bool)
            return operator.index(axis)
        except (AssertionError, TypeError):
            raise TypeError(
                f"{what} of pmap holds {axis!r}. Write an int (the dimension to map), None "
                "(do not map), or a tuple, list or dict of these, one entry for each argument."
            ) from None

    return jtu.tree_map(one, axes, is_leaf=lambda a: a is None)


def device_list(devices: Any, what: str) -> tuple[Any, ...]:
    """Checks a list of devices."""
    fix = "Give a list of devices, such as jax.local_devices()"
    if isinstance(devices, jax.Device) or not isinstance(devices, Iterable):
        raise TypeError(f"devices of {what} is {devices!r}. {fix}.")
    devices = tuple(devices)
    strange = [d for d in devices if not isinstance(d, jax.Device)]
    if strange:
        raise TypeError(f"devices of {what} holds {strange[0]!r}, which is no device. {fix}.")
    twice = [d for d, n in Counter(devices).items() if n > 1]
    if twice:
        raise ValueError(f"devices of {what} holds {twice[0]} more than once. {fix}.")
    if not devices:
        raise ValueError(f"devices of {what} is an empty list. {fix}.")
    return devices


def positive(axis_size: Any) -> int | None:
    if axis_size is None:
        return None
    try:
        size = operator.index(axis_size)
    except TypeError:
        raise TypeError(
            f"axis_size of pmap is {axis_size!r}. Give the number of replicas, an int."
        ) from None
    if size < 1:
        raise ValueError(f"axis_size of pmap is {size}. Give at least 1 replica.")
    return size


def spec(axis: Any, name: str) -> P:
    return P() if axis is UNMAPPED else P(*(None,) * axis, name)


class Names:
    """The names of a call's leaves, worked out only when something wants to print them."""

    def __init__(self, fun: Callable, dynamic: Sequence[int] | None, args: Any, kwargs: Any):
        self._fun, self._dynamic, self._args, self._kwargs = fun, dynamic, args, kwargs

    def argument(self, position: int) -> str:
        if self._dynamic is not None:
            position = self._dynamic[position]
        try:
            parameters = list(inspect.signature(self._fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        if position < len(parameters) and parameters[position].kind <= 1:
            return parameters[position].name
        return f"argument {position}"

    def leaves(self) -> list[str]:
        """`params['w']` for each leaf."""
        names = []
        for path, _ in jtu.tree_leaves_with_path((self._args, self._kwargs)):
            positional = path[0].idx == 0
            head = self.argument(path[1].idx) if positional else str(path[1].key)
            names.append(head + jtu.keystr(path[2:]))
        return names

    def owners(self) -> list[int | None]:
        """The position (among all positional arguments) that each leaf belongs to."""
        where = []
        for path, _ in jtu.tree_leaves_with_path((self._args, self._kwargs)):
            i = path[1].idx if path[0].idx == 0 else None
            where.append(i if i is None or self._dynamic is None else self._dynamic[i])
        return where

    @property
    def count(self) -> int:
        if self._dynamic is None:
            return len(self._args)
        return max((*self._dynamic, -1)) + 1


def flat_in_axes(in_axes: Any, args: tuple, kwargs: dict, names: Names) -> list[Any]:
    """One axis for each leaf of `(args, kwargs)`; keyword arguments are mapped over 0."""
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"pmap was given in_axes={_spoken(in_axes)}, one entry for each of {len(in_axes)} "
            f"positional arguments, but was called with {len(args)}. Give in_axes one entry "
            "for each (arguments passed by keyword are always mapped over dimension 0)."
        )
    try:
        return jtu.tree_leaves(jax.tree.broadcast((in_axes, 0), (args, kwargs)))
    except ValueError:
        pass
    faults = []
    for i, (axes, arg) in enumerate(zip(in_axes, args, strict=True)):
        try:
            jax.tree.broadcast(axes, arg)
        except ValueError:
            faults.append(
                f"  `{names.argument(i)}`: in_axes {_spoken(axes)} for a "
                f"{_spoken(jtu.tree_map(lambda _: '*', arg))}"
            )
    raise ValueError(
        f"in_axes of pmap does not fit {len(faults)} of the arguments:\n"
        + "\n".join(faults)
        + "\nWrite one entry for a whole argument, or a tree of the argument's own structure."
    )


def mapped_size(
    leaves: Sequence[Any],
    axes: Sequence[Any],
    in_axes: Any,
    axis_size: int | None,
    names: Names,
) -> tuple[int, tuple[Any, ...]]:
    """The number of replicas (of this process), and the axes with none negative."""
    faults, sizes, resolved = [], [], []
    for i, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            if not isinstance(leaf, (bool, int, float, complex)):
                faults.append((i, f"is a {type(leaf).__name__}, not an array"))
                continue
            shape = ()
        elif getattr(getattr(leaf, "dtype", None), "kind", "") in tuple("OSUMm"):
            faults.append((i, f"holds {leaf.dtype}, not numbers, so it is not an array of JAX"))
            continue
        if axis is UNMAPPED:
            resolved.append(UNMAPPED)
        elif -len(shape) <= axis < len(shape):
            resolved.append(axis % len(shape))
            sizes.append((i, shape[axis]))
        else:
            faults.append((i, f"has shape {tuple(shape)}, which has no dimension {axis}"))
    if faults:
        raise ValueError(_fault_text(faults, in_axes, names))
    distinct = {n for _, n in sizes}
    if len(distinct) > 1:
        raise ValueError(_size_text(sizes, in_axes, names))
    if not distinct and axis_size is None:
        raise ValueError(
            "No argument of this pmap is mapped, so the number of replicas is unknown. Map an "
            "argument (in_axes=0), or say how many: pmap(f, axis_size=8)."
        )
    size = distinct.pop() if distinct else axis_size
    if size == 0:
        raise ValueError("pmap was given arguments with no rows: the mapped dimension is 0.")
    return size, tuple(resolved)  # type: ignore[return-value]


def _fault_text(faults: list[tuple[int, str]], in_axes: Any, names: Names) -> str:
    leaves, owners = names.leaves(), names.owners()
    lines = [f"  `{leaves[i]}` {text}" for i, text in faults]
    fix = _suggest(in_axes, {owners[i] for i, _ in faults}, names)
    strange = any("not an array" in text for _, text in faults)
    return (
        f"{len(faults)} leaves cannot be mapped by pmap:\n"
        + "\n".join(lines)
        + f"\nTo broadcast an argument use in_axes={fix}"
        + ("; what is no array goes into static_broadcasted_argnums." if strange else ".")
    )


def _size_text(sizes: list[tuple[int, int]], in_axes: Any, names: Names) -> str:
    leaves, owners = names.leaves(), names.owners()
    told: dict[int, str] = {}  # the first leaf of each size
    for i, n in sizes:
        told.setdefault(n, f"`{leaves[i]}` has {n}")
    first = {(owners[i], n) for i, n in sizes}
    # The data, which people put last, are what they mean to map, unless most arguments agree
    # on another size.
    counts = Counter(n for _, n in first)
    last = sizes[-1][1]
    keep = last if counts[last] == max(counts.values()) else counts.most_common(1)[0][0]
    odd = {owner for owner, n in first if n != keep}
    return (
        f"pmap maps over dimensions of different sizes: {', '.join(told.values())}; to "
        f"broadcast an argument use in_axes={_suggest(in_axes, odd, names)}"
    )


def _suggest(in_axes: Any, odd: set[int | None], names: Names) -> str:
    entries: list[Any] = [UNMAPPED] * names.count
    dynamic = names._dynamic if names._dynamic is not None else range(names.count)
    for i, position in enumerate(dynamic):
        entries[position] = in_axes[i] if isinstance(in_axes, tuple) else in_axes
    for position in odd - {None}:
        entries[position] = UNMAPPED  # type: ignore[index]
    return _spoken(tuple(entries))


def _spoken(axes: Any) -> str:
    return repr(axes).replace(repr(UNMAPPED), "None").replace("'*'", "*")


def out_axes_of(out_axes: Any, out: Any) -> list[Any]:
    """One axis for each leaf of a replica's result; those that cannot be are all named."""
    try:
        axes = jtu.tree_leaves(jax.tree.broadcast(out_axes, out))
    except ValueError:
        shape = jtu.tree_map(lambda _: "*", out)
        raise ValueError(
            f"out_axes={_spoken(out_axes)} of pmap does not fit the result, a "
            f"{_spoken(shape)}. Write one entry for the whole result, or a tree of the "
            "result's own structure."
        ) from None
    faults = []
    for (path, leaf), axis in zip(jtu.tree_leaves_with_path(out), axes, strict=True):
        name = f"  result{jtu.keystr(path)}"
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            faults.append(f"{name} is a {type(leaf).__name__}, not an array")
        elif axis is not UNMAPPED and not -np.ndim(leaf) - 1 <= axis <= np.ndim(leaf):
            faults.append(
                f"{name} has shape {np.shape(leaf)} in each replica, so the mapped dimension "
                f"can go to {-np.ndim(leaf) - 1}..{np.ndim(leaf)}, not to {axis}"
            )
    if faults:
        raise ValueError(
            f"{len(faults)} results of this pmap cannot be returned as asked:\n"
            + "\n".join(faults)
            + "\nReturn arrays only, and change out_axes."
        )
    return axes
