"""Rows to their experts and back, by gathers alone. What one device does; pure.

XLA scatters row by row on CPU, and the transpose of a gather is a scatter. A row that moves
goes to a place that is known, so both directions are gathers here, and their transposes too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

FEWEST, MOST = 8, 512
"""Rows of a block: so many that a product of one is worth its call, so few that the last
block of an expert, which is filled up, wastes little."""


@jax.custom_vjp
def move(x: Array, source: Array, target: Array) -> Array:
    """`[a, width] -> [b, width]`: row i is `x[source[i]]`.

    `target` `[copies, a]` says where each row goes, b or more where nowhere. A row of the
    result to which nothing goes is filled with a real row (a row of zeros may have no
    derivative), and hands no gradient back.
    """
    return x[source]


def _move_back(target: Array, d: Array):
    last = d.shape[0] - 1
    rows = (jnp.where((t <= last)[:, None], d[jnp.minimum(t, last)], 0) for t in target)
    return sum(rows), None, None


move.defvjp(lambda x, source, target: (x[source], target), _move_back)


def ranks(ids: Array, count: int) -> tuple[Array, Array]:
    """How many before each are of its expert, and how many each expert has.

    `ids`: `[choices]`; `count` where there is none.
    """
    one_hot = ids[:, None] == jnp.arange(count)[None]
    upto = jnp.cumsum(one_hot, 0, dtype=jnp.int32)
    return jnp.where(one_hot, upto, 0).sum(-1) - 1, upto[-1]


def inverse(at: Array, places: int) -> Array:
    """Which choice is at each place; the number of choices where there is none."""
    choices = at.shape[0]
    return jnp.full(places, choices, jnp.int32).at[at].set(jnp.arange(choices), mode="drop")


def _before(counts: Array, axis: int) -> Array:
    return jnp.cumsum(counts, axis) - counts


class Blocks(NamedTuple):
    """Rows from several devices, put together by expert into blocks of one expert each."""

    source: Array  # [blocks, size], which row as they came
    real: Array  # [blocks, size], false for what only fills a block up
    target: Array  # [rows], where in the blocks
    owner: Array  # [blocks], the expert
    used: Array  # scalar; the first so many blocks hold something


def blocks(counts: Array, slots: int, average: int) -> Blocks:
    """Where `slots` rows of each of n devices go.

    `counts`: `[n, experts]`, how many rows of each device are for each expert, in that order;
    the rest of its slots is empty. `average`: what an expert gets if all get alike.
    """
    n, experts = counts.shape
    # An expert fills its last block up by half on average: an eighth of a quarter's blocks.
    size = min(max(-(-average // 4), FEWEST), MOST)
    size = -(-size // 8) * 8
    many = n * slots // size + experts
    start, earlier = _before(counts, 1), _before(counts, 0)
    groups = counts.sum(0)
    of_expert = -(-groups // size)
    first = _before(of_expert, 0)
    used = of_expert.sum()

    # The slots of a device, in the order of experts.
    slot = jnp.arange(slots)
    ends = jnp.cumsum(counts, 1)
    expert = (slot.reshape(1, -1, 1) >= ends[:, None]).sum(-1)  # [n, slots]
    there = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    shift = first[None] * size + earlier - start
    target = jnp.take_along_axis(shift, expert, 1) + slot[None]
    target = jnp.where(there, target, 0).reshape(-1)

    owner = (jnp.arange(many)[:, None] >= jnp.cumsum(of_expert)[None]).sum(-1)
    owner = jnp.minimum(owner, experts - 1)
    row = (jnp.arange(many) - first[owner])[:, None] * size + jnp.arange(size)[None]
    real = (row < groups[owner][:, None]) & (jnp.arange(many) < used)[:, None]
    row = jnp.where(real, row, row[:, :1])  # the first of a block is real
    device = (row[..., None] >= jnp.cumsum(counts, 0).T[owner][:, None]).sum(-1)
    device = jnp.minimum(device, n - 1)
    shift = (start - earlier)[device, owner[:, None]]
    source = jnp.clip(device * slots + shift + row, 0, n * slots - 1)
    return Blocks(source, real, target, owner, used)


def each_block(f: Callable, params: Any, x: Array, plan: Blocks) -> Array:
    """`f(params of its expert, rows)` for each block that holds something.

    `x`: `[rows, width]`, as they came, and so is the result; what it has in empty slots means
    nothing. Time goes into the blocks that hold something. The backward pass computes `f`
    anew, so that nothing inside it is kept for the worst case.
    """
    many, size = plan.source.shape
    shape = lambda x, n: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
    own = jax.tree.map(lambda w: shape(w, 1), params)
    # What `f` closes over may be differentiated too, so it becomes an argument.
    program = jax.make_jaxpr(f)(own, shape(x, size))
    (result,) = program.out_avals
    smooth, rest = eqx.partition((params, program.consts), eqx.is_inexact_array)
    whole, static = eqx.partition(rest, eqx.is_array)
    gather = lambda x, plan, b: x[plan.source[b]]
    put = lambda x, new, b: lax.dynamic_update_slice_in_dim(x, new, b * size, 0)
    of = lambda tree, e: jax.tree.map(lambda w: lax.dynamic_slice_in_dim(w, e, 1), tree)

    def at(smooth, whole, e):
        """What is differentiated, for expert e, and the function of it and the rows."""
        (own, shared), (ints, more) = smooth, whole
        ints = of(ints, e)

        def block(mine, x):
            own, consts = eqx.combine(mine, (ints, more), static)
            run = jaxpr_as_fun(program.replace(consts=consts))
            return run(*jax.tree.leaves(own), x)[0]

        return (of(own, e), shared), block

    def forward(smooth, whole, x, plan):
        def visit(b, y):
            mine, block = at(smooth, whole, plan.owner[b])
            return put(y, block(mine, gather(x, plan, b)), b)

        y = jnp.zeros((many * size, result.shape[1]), result.dtype)
        y = lax.fori_loop(0, plan.used, visit, y)
        return y[plan.target], (smooth, whole, x, plan)

    def backward(kept, dy):
        smooth, whole, x, plan = kept

        def visit(b, carry):
            (d_own, d_shared), dx = carry
            e = plan.owner[b]
            mine, block = at(smooth, whole, e)
            d_rows = jnp.where(plan.real[b][:, None], gather(dy, plan, b), 0)
            pull = jax.vjp(block, mine, gather(x, plan, b))[1]
            (more, more_shared), d_rows = pull(d_rows)
            add = lambda d, m: d + m.astype(d.dtype)
            add_own = lambda d, m: lax.dynamic_update_slice_in_dim(
                d, add(lax.dynamic_slice_in_dim(d, e, 1), m), e, 0
            )
            d = jax.tree.map(add_own, d_own, more), jax.tree.map(add, d_shared, more_shared)
            return d, put(dx, d_rows, b)

        wide = lambda w: jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))
        start = jax.tree.map(wide, smooth), jnp.zeros((many * size, x.shape[1]), x.dtype)
        d, dx = lax.fori_loop(0, plan.used, visit, start)
        d = jax.tree.map(lambda d, w: d.astype(w.dtype), d, smooth)
        return d, None, dx[plan.target], None

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(smooth, whole, x, plan)
