"""Ring attention: keys travel from neighbour to neighbour, queries stay. Per device.

Ring Attention of Liu, Zaharia and Abbeel 2023, in the zigzag order of Zhu 2024
(ring-flash-attention), with a backward pass of its own, in which the gradients of the keys
travel with them.

In zigzag order the sequence is cut into 2n chunks and device i holds chunks i and 2n-1-i. Of
the keys of a device j < i, both chunks of queries see the first and neither sees the second;
of a device j > i, the second chunk of queries sees both and the first neither. So in each
round each device does half of what it would without `causal`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._blockwise import (
    Keys,
    Queries,
    Slopes,
    back,
    back_at_own,
    finish,
    look,
    look_at_own,
    slopes,
)

AXIS = "seq"


def positions(index: Any, n: int, size: int, order: str) -> Array:
    """Where in the sequence the `size` tokens of device `index` of `n` belong."""
    if order == "zigzag":
        half = size // 2
        first, second = index * half, (2 * n - 1 - index) * half
        return jnp.concatenate([first + jnp.arange(half), second + jnp.arange(half)])
    return index * size + jnp.arange(size)


def _round(n: int, tree: Any) -> Any:
    """To the next device. What is the same for all (`None`) stays."""
    onward = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, onward), tree)


def forward(
    q: Array, segment: Array | None, keys: Keys, n: int, causal: bool, order: str
) -> tuple[Array, Array]:
    """The result and the log of the denominator, in float32."""
    me = lax.axis_index(AXIS) if n > 1 else 0
    size = q.shape[1]
    queries = Queries(q, positions(me, n, size, order), segment)
    sums = look_at_own(queries, keys, causal, True)

    def visit(carry, r):
        keys, sums = carry
        keys = _round(n, keys)
        full = lambda sums: look(sums, queries, keys, False)
        if not causal:
            return (keys, full(sums)), None
        earlier = (me - r) % n < me
        if order != "zigzag":
            return (keys, lax.cond(earlier, full, lambda sums: sums, sums)), None
        half = size // 2

        def second(sums):
            tail = look(
                type(sums)(*(x[:, half:] for x in sums)), queries.part(half, size), keys, False
            )
            return type(sums)(
                *(jnp.concatenate([a[:, :half], b], 1) for a, b in zip(sums, tail, strict=True))
            )

        first = lambda sums: look(sums, queries, keys.part(0, half), False)
        return (keys, lax.cond(earlier, first, second, sums)), None

    if n > 1:
        (_, sums), _ = lax.scan(visit, (keys, sums), jnp.arange(1, n))
    return finish(sums)


def backward(
    q: Array,
    segment: Array | None,
    keys: Keys,
    out: Array,
    log: Array,
    d_out: Array,
    n: int,
    causal: bool,
    order: str,
) -> tuple[Array, Array, Array]:
    """Gradients of the scaled queries, the keys and the values, in float32."""
    me = lax.axis_index(AXIS) if n > 1 else 0
    size = q.shape[1]
    queries = Queries(q, positions(me, n, size, order), segment)
    known = slopes(out, log, d_out)
    dq, own_dk, own_dv = back_at_own(queries, known, keys, causal, True)
    if n == 1:
        return dq, own_dk, own_dv

    def visit(carry, r):
        keys, dq, dk, dv = carry
        keys, dk, dv = _round(n, (keys, dk, dv))
        full = lambda: back(queries, known, keys, False)
        if not causal:
            more = full()
        else:
            earlier = (me - r) % n < me
            if order != "zigzag":
                none = lambda: (jnp.zeros_like(dq), jnp.zeros_like(dk), jnp.zeros_like(dv))
                more = lax.cond(earlier, full, none)
            else:
                more = lax.cond(earlier, first, second, keys)
        return (keys, dq + more[0], dk + more[1], dv + more[2]), None

    half = size // 2
    behind = lambda x: jnp.pad(x, [(0, 0), (0, half)] + [(0, 0)] * (x.ndim - 2))
    before = lambda x: jnp.pad(x, [(0, 0), (half, 0)] + [(0, 0)] * (x.ndim - 2))

    def first(keys):
        dq, dk, dv = back(queries, known, keys.part(0, half), False)
        return dq, behind(dk), behind(dv)

    def second(keys):
        late = Slopes(*(x[:, half:] for x in known))
        dq, dk, dv = back(queries.part(half, size), late, keys, False)
        return before(dq), dk, dv

    start = (keys, dq, jnp.zeros(keys.k.shape), jnp.zeros(keys.v.shape))
    (_, dq, dk, dv), _ = lax.scan(visit, start, jnp.arange(1, n))
    dk, dv = _round(n, (dk, dv))  # home
    return dq, own_dk + dk, own_dv + dv
