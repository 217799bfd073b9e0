"""Steps whose loss or gradient is not finite: skipped, counted, and named when they go on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import _spec

# As in Micikevicius et al. 2018, section 3.2 (and NVIDIA's and PyTorch's scalers): start high,
# halve at each overflow, double after 2000 steps without one.
FIRST_SCALE = 2.0**15
GROW_AFTER = 2000
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**24


class Guard(NamedTuple):
    """What is remembered of steps that were not finite. All scalars."""

    skipped: Any
    """int32: how many steps were skipped in all."""
    in_a_row: Any
    """int32: how many of them just now, one after the other; those that were skipped to find
    the scale of float16 not counted."""
    leaf: Any
    """int32: the first parameter whose gradient was not finite, as an index among those that
    train, when a step was last skipped; the number of them if it was the loss alone, one more
    if it was what the optimizer made of a finite gradient; -1 if none was."""
    scale: Any
    """float32: what the loss is multiplied by before it is differentiated, for float16."""
    good: Any
    """int32: how many finite steps there were since the scale last changed."""


def first(scales: bool) -> Guard:
    zero = jnp.zeros((), jnp.int32)
    scale = jnp.asarray(FIRST_SCALE if scales else 1.0, jnp.float32)
    return Guard(zero, zero, zero - 1, scale, zero)


def follow(guard: Guard, finite: Any, loss: Any, squares: Any, scales: bool) -> Guard:
    """The guard after a step with this loss, whose gradients have these sums of squares."""
    # With nothing wrong but a scale above 1, it is the scale that is too high.
    bad = ~jnp.isfinite(squares)
    searching = jnp.isfinite(loss) & bad.any() & (guard.scale > 1) if scales else False
    leaf = jnp.where(bad.any(), jnp.argmax(bad), squares.size).astype(jnp.int32)
    good = jnp.where(finite, guard.good + 1, 0)
    scale = guard.scale
    if scales:
        grow = good >= GROW_AFTER
        scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), scale / 2)
        scale = jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
        good = jnp.where(grow, 0, good)
    return Guard(
        skipped=guard.skipped + jnp.where(finite, 0, 1),
        in_a_row=jnp.where(finite, 0, guard.in_a_row + jnp.where(searching, 0, 1)),
        leaf=jnp.where(finite, guard.leaf, leaf),
        scale=scale,
        good=good,
    )


def updated(new: Sequence[Any], specs: Sequence[P]) -> Any:
    """Whether new parameters are finite, by the few smallest.

    A learning rate that is not finite spoils all of them. To read all would take a fraction of
    the update again, and to read those that are split a message.
    """
    whole = [x for x, s in zip(new, specs, strict=True) if not _spec.axes_of(s)]
    few = sorted(whole, key=lambda x: x.size)[:4]
    return jnp.all(jnp.asarray([jnp.isfinite(x).all() for x in few] or True))


def choose(finite: Any, new: Any, old: Any) -> Any:
    """`new` where the step was finite, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
