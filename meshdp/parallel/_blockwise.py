"""Softmax attention by blocks of keys: what one device does with what it holds. Pure.

Online softmax of Milakov and Gimelshein 2018, with the backward pass of FlashAttention (Dao
et al. 2022): nothing as large as tokens × tokens is kept. Letters: b batch, t queries, s keys,
k key-value heads, g query heads for each of them, h head size.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 512
"""Keys at a time: scores take `queries * BLOCK` numbers for each head."""


class Keys(NamedTuple):
    """What queries look at, and what travels around the ring."""

    k: Array  # [b, s, k, h]
    v: Array  # [b, s, k, h]
    position: Array  # [s]
    segment: Array | None  # [b, s]
    mask: Array | None  # [b, s]

    def part(self, start: int, stop: int) -> "Keys":
        cut = lambda x: None if x is None else x[:, start:stop]
        return Keys(
            self.k[:, start:stop],
            self.v[:, start:stop],
            self.position[start:stop],
            cut(self.segment),
            cut(self.mask),
        )


class Queries(NamedTuple):
    q: Array  # [b, t, k, g, h], scaled
    position: Array  # [t]
    segment: Array | None  # [b, t]

    def part(self, start: int, stop: int) -> "Queries":
        segment = None if self.segment is None else self.segment[:, start:stop]
        return Queries(self.q[:, start:stop], self.position[start:stop], segment)


class Sums(NamedTuple):
    """The softmax so far: its largest score, its denominator and its numerator."""

    top: Array  # [b, t, k, g]
    weight: Array  # [b, t, k, g]
    value: Array  # [b, t, k, g, h]


def nothing(q: Array, size: int) -> Sums:
    shape = q.shape[:-1]
    return Sums(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, size), jnp.float32),
    )


def _scores(queries: Queries, keys: Keys, causal: bool) -> Array:
    scores = jnp.einsum(
        "btkgh,bskh->btkgs", queries.q, keys.k, preferred_element_type=jnp.float32
    )
    seen = None
    if causal:
        seen = (queries.position[:, None] >= keys.position[None])[None]
    for more in (
        None if keys.mask is None else keys.mask[:, None],
        None
        if keys.segment is None or queries.segment is None
        else queries.segment[:, :, None] == keys.segment[:, None],
    ):
        if more is not None:
            seen = more if seen is None else seen & more
    return scores if seen is None else jnp.where(seen[:, :, None, None], scores, -jnp.inf)


def _finite(x: Array) -> Array:
    # A query that sees nothing has a largest score of -inf, and -inf - -inf is NaN.
    return jnp.where(jnp.isneginf(x), 0.0, x)


def _blocks(keys: Keys) -> tuple[Keys | None, Keys | None]:
    """Keys in blocks along a new first dimension, and those that are left."""
    size = keys.position.shape[0]
    n = size // BLOCK
    rest = keys.part(n * BLOCK, size) if size % BLOCK else None
    if n == 0 or size == BLOCK:
        return None, keys
    keys = keys.part(0, n * BLOCK)
    rows = lambda x: (
        None if x is None else jnp.moveaxis(x.reshape(x.shape[0], n, BLOCK, *x.shape[2:]), 1, 0)
    )
    blocks = Keys(
        rows(keys.k),  # type: ignore[arg-type]
        rows(keys.v),  # type: ignore[arg-type]
        keys.position.reshape(n, BLOCK),
        rows(keys.segment),
        rows(keys.mask),
    )
    return blocks, rest


def look(sums: Sums, queries: Queries, keys: Keys, causal: bool) -> Sums:
    """Adds what the queries see in these keys."""
    blocks, rest = _blocks(keys)
    if blocks is not None:
        step = lambda sums, block: (_look(sums, queries, block, causal), None)
        sums = lax.scan(step, sums, blocks)[0]
    return sums if rest is None else _look(sums, queries, rest, causal)


def _look(sums: Sums, queries: Queries, keys: Keys, causal: bool) -> Sums:
    scores = _scores(queries, keys, causal)
    top = jnp.maximum(sums.top, scores.max(-1))
    p = jnp.exp(scores - _finite(top)[..., None])
    shrink = jnp.exp(sums.top - _finite(top))
    new = jnp.einsum(
        "btkgs,bskh->btkgh", p.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32
    )
    return Sums(top, sums.weight * shrink + p.sum(-1), sums.value * shrink[..., None] + new)


def finish(sums: Sums) -> tuple[Array, Array]:
    """The result [b, t, k, g, h] and the log of the denominator [b, t, k, g].

    A query that saw nothing gets 0.
    """
    weight = jnp.where(sums.weight == 0, 1.0, sums.weight)
    return sums.value / weight[..., None], sums.top + jnp.log(weight)


class Slopes(NamedTuple):
    """What the backward pass knows of the queries."""

    d_out: Array  # [b, t, k, g, h]
    dot: Array  # [b, t, k, g], of the output and its gradient
    log: Array  # [b, t, k, g]


def slopes(out: Array, log: Array, d_out: Array) -> Slopes:
    dot = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    return Slopes(d_out, dot, log)


def back(
    queries: Queries, slopes: Slopes, keys: Keys, causal: bool
) -> tuple[Array, Array, Array]:
    """Gradients of the scaled queries, the keys and the values, in float32."""
    blocks, rest = _blocks(keys)
    if blocks is None:
        return _back(queries, slopes, keys, causal)

    def step(dq, block):
        more, dk, dv = _back(queries, slopes, block, causal)
        return dq + more, (dk, dv)

    dq, (dk, dv) = lax.scan(step, jnp.zeros(queries.q.shape, jnp.float32), blocks)
    flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    dk, dv = flat(dk), flat(dv)
    if rest is not None:
        more, *tail = _back(queries, slopes, rest, causal)
        dq = dq + more
        dk, dv = (jnp.concatenate(pair, 1) for pair in zip((dk, dv), tail, strict=True))
    return dq, dk, dv


def _back(queries, slopes, keys, causal):
    wide = dict(preferred_element_type=jnp.float32)
    p = jnp.exp(_scores(queries, keys, causal) - _finite(slopes.log)[..., None])
    dtype = keys.v.dtype
    dv = jnp.einsum("btkgs,btkgh->bskh", p.astype(dtype), slopes.d_out, **wide)
    dp = jnp.einsum("btkgh,bskh->btkgs", slopes.d_out, keys.v, **wide)
    ds = (p * (dp - slopes.dot[..., None])).astype(dtype)
    dq = jnp.einsum("btkgs,bskh->btkgh", ds, keys.k, **wide)
    dk = jnp.einsum("btkgs,btkgh->bskh", ds, queries.q, **wide)
    return dq, dk, dv


PARTS = 4
"""Into so many parts queries are cut that look at the keys of their own tokens. What comes
after all of a part is left out: of the half that `causal` hides, three quarters."""


def _cuts(size: int, ascending: bool) -> list[tuple[int, int]]:
    if not ascending:
        return [(0, size)]
    ends = [min(-(-size * i // (PARTS * BLOCK)) * BLOCK, size) for i in range(PARTS + 1)]
    return list(itertools.pairwise(dict.fromkeys(ends)))


def look_at_own(queries: Queries, keys: Keys, causal: bool, ascending: bool) -> Sums:
    """What queries see in the keys of the same tokens; `ascending` if these are in order."""
    sums = []
    for start, stop in _cuts(keys.position.shape[0], causal and ascending):
        part = queries.part(start, stop)
        empty = nothing(part.q, keys.v.shape[-1])
        sums.append(look(empty, part, keys.part(0, stop), causal))
    return Sums(*(jnp.concatenate(x, 1) for x in zip(*sums, strict=True)))


def back_at_own(
    queries: Queries, slopes: Slopes, keys: Keys, causal: bool, ascending: bool
) -> tuple[Array, Array, Array]:
    """As `back`, for `look_at_own`."""
    size = keys.position.shape[0]
    grow = lambda x: jnp.pad(x, [(0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)])
    dqs, dks, dvs = [], [], []
    for start, stop in _cuts(size, causal and ascending):
        known = Slopes(*(x[:, start:stop] for x in slopes))
        dq, dk, dv = back(queries.part(start, stop), known, keys.part(0, stop), causal)
        dqs.append(dq)
        dks.append(grow(dk))
        dvs.append(grow(dv))
    return jnp.concatenate(dqs, 1), sum(dks[1:], dks[0]), sum(dvs[1:], dvs[0])


@jax.custom_vjp
def attend(q, position, segment, keys: Keys, causal: Array):
    return _attend(q, position, segment, keys, causal)[0]


def _attend(q, position, segment, keys, causal):
    # `causal` is an array of shape [causal, ascending], so that these are static to JAX: a
    # plain bool would be traced.
    queries = Queries(q, position, segment)
    out, log = finish(look_at_own(queries, keys, *map(bool, causal.shape)))
    out = out.astype(q.dtype)
    return out, (q, position, segment, keys, causal, out, log)


def _attend_back(kept, d_out):
    q, position, segment, keys, causal, out, log = kept
    queries = Queries(q, position, segment)
    known = slopes(out, log, d_out)
    dq, dk, dv = back_at_own(queries, known, keys, *map(bool, causal.shape))
    d_keys = Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype), None, None, None)  # type: ignore[arg-type]
    return dq.astype(q.dtype), None, None, d_keys, None


attend.defvjp(_attend, _attend_back)
