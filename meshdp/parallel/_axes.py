"""Where a block stands: which mesh axes it may take into its own hands."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from .. import _jaxapi

EXAMPLES = ("data", "fsdp")
"""The axes that split the first dimension of a batch."""


def here() -> dict[str, int]:
    """The axes that the compiler partitions here, with more than one device, in mesh order.

    Empty without a mesh, on one device, and where everything is manual already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = _jaxapi.automatic_axes()
    return {a: mesh.shape[a] for a in mesh.axis_names if a in free and mesh.shape[a] > 1}


def outside() -> tuple[str, ...]:
    """The axes that split the examples and are manual already, as in `make_train_step`."""
    mesh = jax.sharding.get_abstract_mesh()
    taken = _jaxapi.manual_axes()
    return tuple(a for a in EXAMPLES if a in taken and mesh.shape[a] > 1)


def some(axes: Sequence[str], sizes: dict[str, int]) -> tuple[str, ...] | None:
    """An entry of a spec: those of `axes` that are here."""
    found = tuple(a for a in axes if a in sizes)
    return found or None


def examples(rows: int, sizes: dict[str, int]) -> tuple[str, ...] | None:
    """The entry of a spec for the first dimension of a batch of `rows`.

    Outside of the pipeline `"stage"` is free, and outside of the experts `"expert"` is: they
    share the examples where these divide, so that the work there is not done again by each.
    """
    for more in (("stage", "expert"), ("expert",), ("stage",)):
        entry = some((*EXAMPLES, *more), sizes)
        if not rows % ways(entry, sizes):
            return entry
    return some(EXAMPLES, sizes)


def refuse_others(who: str, **given: Any) -> None:
    """Python's lists and numbers have no shape to check."""
    wrong = [
        f"{name} is a {type(x).__name__}"
        for name, x in given.items()
        if not (hasattr(x, "shape") and hasattr(x, "dtype"))
    ]
    if wrong:
        raise TypeError(f"{who} takes arrays, but {', '.join(wrong)}. Use jnp.asarray.")


def ways(entry: tuple[str, ...] | None, sizes: dict[str, int]) -> int:
    return math.prod(sizes[a] for a in entry or ())


def refuse_manual(who: str, axis: str) -> None:
    """An axis that the caller has made manual is no longer the block's to use."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis in _jaxapi.manual_axes() and mesh.shape[axis] > 1:
        raise ValueError(
            f"{who} works over the mesh axis {axis!r}, which is manual already where it is "
            f"called: it stands inside a shard_map over {axis!r}. Call it outside of that, or "
            f"leave {axis!r} out of that shard_map's axis_names."
        )


def manually(
    who: str, f: Callable, axes: frozenset[str], in_specs: Any, out_specs: Any
) -> Callable:
    """`shard_map` over `axes`, refused where the compiler would take the process down."""
    mesh = jax.sharding.get_abstract_mesh()
    order = {a: i for i, a in enumerate(mesh.axis_names)}
    taken = _jaxapi.manual_axes()
    late = sorted(
        (a for a in taken if order[a] > min(order[b] for b in axes)), key=lambda a: order[a]
    )
    if late and _jaxapi.nested_axes_must_follow():
        first = [a for a in mesh.axis_names if a in axes and order[a] < order[late[-1]]]
        raise ValueError(
            f"{who} needs {', '.join(map(repr, first))} inside a shard_map over "
            f"{', '.join(map(repr, late))}, which the compiler of jax {_jaxapi.VERSION} "
            "cannot do when the outer axis comes later in the mesh (it aborts the process). "
            f"The axes lie in the order {', '.join(mesh.axis_names)}: make the earlier ones "
            "manual first."
        )
    return _jaxapi.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def everything(who: str, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each device's piece, with nothing left to the compiler's partitioner.

    Where some axes stay automatic, a collective over the others first gathers its operand
    over them; so all become manual. Without a mesh, `f` itself.
    """
    if not here():
        return f
    return manually(who, f, _jaxapi.automatic_axes(), in_specs, out_specs)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def total(x: jax.Array, axis: str, n: int) -> jax.Array:
    """The sum over a manual axis of `n`, of what then leaves the `shard_map` the same for all.

    `shard_map` hands each device 1/n of the gradient of such a result; the transpose of `psum`
    would add these up again by another all-reduce.
    """
    return lax.psum(x, axis)


total.defvjp(lambda x, axis, n: (lax.psum(x, axis), None), lambda axis, n, _, d: (d * n,))


def near(n: int, by: int) -> str:
    """The sizes next to `n` that divide by `by`: "8 or 16"."""
    below = n // by * by
    return f"{below} or {below + by}" if below else f"{by}"
