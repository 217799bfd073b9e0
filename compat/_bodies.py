"""What is compiled: one replica on each device, several on each, or a map within a map."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compat._axes import UNMAPPED, out_axes_of, spec
from meshdp import _jaxapi

Run = Callable[[Sequence[Any]], Any]
"""Calls the user's function on the leaves of one replica's arguments."""


class Resize(Exception):
    """The arguments' sizes are not those this program was chosen for: choose again."""


class Axis(NamedTuple):
    name: str
    size: int


class NeedAxis(BaseException):
    """A map within a map wants a mesh axis of its own, which only the outermost can give.

    A `BaseException`, so that `except Exception` in a user's function lets it pass.
    """

    def __init__(self, axis: Axis):
        self.axis = axis


class Frame(NamedTuple):
    """A mapped function that is being traced."""

    name: Hashable
    given: bool  # whether the user gave the name
    used: int  # devices taken by this map and those around it
    spares: tuple[Axis, ...]  # mesh axes left for the maps within
    room: int  # devices there are; 0 where maps within must be vectorised


_local = threading.local()


def frames() -> list[Frame]:
    if not hasattr(_local, "frames"):
        _local.frames = []
    return _local.frames


def _framed(run: Run, frame: Frame, leaves: Sequence[Any]) -> Any:
    frames().append(frame)
    try:
        return run(leaves)
    finally:
        frames().pop()


class Axes(NamedTuple):
    """The axes of one call's leaves, and of its result."""

    given: tuple[Any, ...]  # as the user wrote them, one for each leaf
    resolved: tuple[Any, ...]  # none negative
    out: Any  # a prefix of the result


def _take(block: Any, given: Any, axis: Any) -> Any:
    if axis is UNMAPPED:
        return block
    if block.ndim <= axis or given % block.ndim != axis or block.shape[axis] != 1:
        raise Resize
    return lax.squeeze(block, [axis])


def mapped(run: Run, axes: Axes, axis: Axis, frame: Frame, mesh: Mesh | None) -> Callable:
    """One replica for each index of a mesh axis: of `mesh`, or of the mesh in sight."""
    late: dict[str, Any] = {}

    def body(*blocks):
        leaves = [_take(*it) for it in zip(blocks, axes.given, axes.resolved, strict=True)]
        out = _framed(run, frame, leaves)
        out_axes = out_axes_of(axes.out, out)
        late["axes"] = [
            a % (jnp.ndim(x) + 1) if a is not UNMAPPED and a < 0 else None
            for x, a in zip(jtu.tree_leaves(out), out_axes, strict=True)
        ]
        flat, tree = jtu.tree_flatten(out)
        flat = [
            x if a is UNMAPPED else lax.expand_dims(x, [max(a, 0)])
            for x, a in zip(flat, out_axes, strict=True)
        ]
        return jtu.tree_unflatten(tree, flat)

    # Where the mapped dimension lands when counted from the end is known only once the rank
    # of the result is. Until then it is in front.
    out_specs = jtu.tree_map(
        lambda a: spec(a if a is UNMAPPED else max(a, 0), axis.name), axes.out
    )
    whole = _jaxapi.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(spec(a, axis.name) for a in axes.resolved),
        out_specs=out_specs,
        axis_names={axis.name},
    )

    def program(*leaves):
        out = whole(*leaves)
        if not any(a is not None for a in late["axes"]):
            return out
        flat, tree = jtu.tree_flatten(out)
        for i, a in enumerate(late["axes"]):
            if a is not None:
                flat[i] = jnp.moveaxis(flat[i], 0, a)
                if mesh is not None:
                    sharding = NamedSharding(mesh, spec(a, axis.name))
                    flat[i] = lax.with_sharding_constraint(flat[i], sharding)
        return jtu.tree_unflatten(tree, flat)

    return program


def vectorised(run: Run, axes: Axes, name: Hashable, size: int, frame: Frame) -> Callable:
    """All replicas at once by `jax.vmap`; the compiler spreads them over the devices."""

    def program(*leaves):
        late: dict[str, Any] = {}

        def one(*leaves):
            out = _framed(run, frame, leaves)
            late["axes"] = out_axes_of(axes.out, out)
            return out

        for x, given, axis in zip(leaves, axes.given, axes.resolved, strict=True):
            if axis is not UNMAPPED and (
                x.ndim <= axis or given % x.ndim != axis or x.shape[axis] != size
            ):
                raise Resize
        in_axes = tuple(None if a is UNMAPPED else a for a in axes.resolved)
        out = jax.vmap(one, in_axes=in_axes, axis_size=size, axis_name=name)(*leaves)
        flat, tree = jtu.tree_flatten(out)
        flat = [
            x[0] if a is UNMAPPED else jnp.moveaxis(x, 0, a)
            for x, a in zip(flat, late["axes"], strict=True)
        ]
        return jtu.tree_unflatten(tree, flat)

    return program


def at_top_level(program: Callable) -> Callable:
    """Refuses to be traced where a mesh is set or another map is being traced.

    Asked when the program is traced, for asking at every call would cost as much as the rest.
    """

    @functools.wraps(program)
    def checked(*leaves):
        if frames() or not jax.sharding.get_abstract_mesh().empty:
            raise Resize
        return program(*leaves)

    return checked


def within(run: Run, axes: Axes, name: Hashable, given: bool, size: int) -> Callable:
    """A map inside a function that is itself mapped (by us, or by a `shard_map`)."""
    outer = frames()[-1] if frames() else None
    taken = {f.name for f in frames()}
    inner = Frame(name, given, 1, (), 0)
    alone = vectorised(run, axes, name, size, inner)
    if outer is None or not outer.room or not isinstance(name, str) or name in taken:
        return alone
    if not outer.spares:
        if outer.used * size > outer.room:
            return alone
        raise NeedAxis(Axis(name if given else f"_pmap{len(frames())}", size))
    spare, *rest = outer.spares
    if spare.size != size or (given and spare.name != name):
        return alone
    inner = Frame(spare.name, given, outer.used * size, tuple(rest), outer.room)
    return mapped(run, axes, spare, inner, None)


def out_shardings(axes: Axes, mesh: Mesh, name: str) -> Any:
    """Where results go; `None` (the compiler's choice) where counted from the end."""
    return jtu.tree_map(
        lambda a: (
            NamedSharding(mesh, P())
            if a is UNMAPPED
            else None
            if a < 0
            else NamedSharding(mesh, spec(a, name))
        ),
        axes.out,
    )
