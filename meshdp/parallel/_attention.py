"""Exact attention over a sequence that is split over the mesh axis `"seq"`."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from .._check import path_str
from . import _ring
from ._axes import (
    EXAMPLES,
    everything,
    examples,
    here,
    near,
    refuse_manual,
    refuse_others,
    some,
    ways,
)
from ._blockwise import Keys, attend

METHODS, ORDERS = ("ring", "ulysses"), ("natural", "zigzag")


@dataclasses.dataclass(frozen=True)
class _Plan:
    n: int
    causal: bool
    order: str
    batch: tuple[str, ...] | None
    heads: tuple[str, ...] | None

    @property
    def whole(self) -> P:  # [batch, tokens, heads, ...]
        return P(self.batch, "seq" if self.n > 1 else None, self.heads)

    @property
    def rows(self) -> P:  # [batch, tokens]
        return P(self.batch, "seq" if self.n > 1 else None)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    mask: Array | None = None,
    segment_ids: Array | None = None,
    scale: float | None = None,
    method: str = "ring",
    order: str = "natural",
) -> Array:
    """Softmax attention, exact, whether the tokens lie on one device or over `"seq"`.

    As `jax.nn.dot_product_attention`. Under a mesh, the batch is split over `"data"` and
    `"fsdp"`, the tokens over `"seq"` and the heads over `"tensor"`. No device ever holds all
    tokens of a head (`"ring"`), and none holds scores of more than 512 keys at a time.

    `"ring"` passes keys and values from neighbour to neighbour and back again with their
    gradients (Liu et al. 2023). `"ulysses"` exchanges tokens for heads with four all-to-alls
    and back (Jacobs et al. 2023): less traffic, but `"seq"` must divide the heads, and each
    device holds whole sequences of some.

    With `causal`, device i of n of a natural order has i times the work of the first;
    `order="zigzag"` gives all the same. The tokens must then be in that order: apply
    `zigzag` to the tokens, targets and positions at the start of the model.

    **Arguments:**

    - `q`: `[batch, tokens, heads, size]`, global shape, as all here.
    - `k`, `v`: `[batch, tokens, kv_heads, size]`; `kv_heads` divides `heads`, and each serves
        `heads / kv_heads` consecutive query heads. The size of `v` may differ.
    - `causal`: whether a token sees only itself and the tokens before it.
    - `mask`: `[batch, tokens]`, false or 0 where a key is padding, which nobody sees.
    - `segment_ids`: `[batch, tokens]` integers; tokens see only those of equal id.
    - `scale`: of the scores; `1 / sqrt(size)` if `None`.

    **Returns:**

    `[batch, tokens, heads, size of v]`. A token that sees nothing gets 0.

    **Raises:**

    - `ValueError`: naming every argument of a shape that does not fit the others or the mesh.
    - `TypeError`: if something is not an array.
    """
    sizes = here()
    refuse_manual("attention", "seq")
    more = {"mask": mask, "segment_ids": segment_ids}
    given = {name: x for name, x in more.items() if x is not None}
    refuse_others("attention", q=q, k=k, v=v, **given)
    _check(q, k, v, mask, segment_ids, method, order, sizes)
    batch, heads = examples(q.shape[0], sizes), some(("tensor",), sizes)
    plan = _Plan(sizes.get("seq", 1), bool(causal), order, batch, heads)
    b, t, n_heads, size = q.shape
    groups = k.shape[2]
    q = q * jnp.asarray(size**-0.5 if scale is None else scale, q.dtype)
    if mask is not None:
        mask = mask != 0
    q = q.reshape(b, t, groups, n_heads // groups, size)
    run = _ulysses if method == "ulysses" and plan.n > 1 else _over_ring
    out: Any = run(plan, q, k, v, segment_ids, mask)
    return out.reshape(b, t, n_heads, v.shape[-1])


def zigzag(x: Any, dim: int = 1) -> Any:
    """Puts the tokens of each array into the order in which causal work is balanced.

    The sequence is cut into twice as many chunks as `"seq"` has devices, and device i gets
    chunks i and 2n-1-i. Without a mesh, or with one device along `"seq"`, nothing changes, so
    call it inside the step. `x` is an array or a pytree of arrays; `dim` is their dimension
    of tokens. A token's target is the next one of the text: shift first, then `zigzag`.

    **Raises:**

    - `ValueError`: naming every array without that dimension, or whose tokens do not divide
        into the chunks.
    """
    return _permute(x, dim, inverse=False)


def unzigzag(x: Any, dim: int = 1) -> Any:
    """Undoes `zigzag`."""
    return _permute(x, dim, inverse=True)


def _permute(x: Any, dim: int, *, inverse: bool) -> Any:
    n = here().get("seq", 1)
    if n == 1:
        return x
    problems = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        name, shape = path_str(path) or "x", jnp.shape(leaf)
        if not -len(shape) <= dim < len(shape):
            problems.append(f"  {name}: shape {shape} has no such dimension; leave it out")
        elif shape[dim] % (2 * n):
            fit = near(shape[dim], 2 * n)
            problems.append(f"  {name}: shape {shape}; give {fit} tokens")
    if problems:
        raise ValueError(
            f"zigzag over seq={n} cuts dimension {dim}, the tokens, into {2 * n} chunks:\n"
            + "\n".join(problems)
        )
    return jax.tree.map(lambda leaf: _permute_one(leaf, dim % leaf.ndim, n, inverse), x)


def _permute_one(x, dim: int, n: int, inverse: bool):
    """Each device sends its two chunks on, one message each.

    As a gather under the compiler's partitioner, it brought the process down inside
    `make_train_step` (spmd_partitioner_util.cc, "Check failed", jax 0.10.2 and 0.12.0.1).
    """
    sizes = here()
    entries = [None] * x.ndim
    entries[0] = examples(x.shape[0], sizes)
    if entries[0] and x.shape[0] % ways(entries[0], sizes):
        entries[0] = None
    entries[dim] = "seq"
    home = lambda chunk: min(chunk, 2 * n - 1 - chunk)
    evens = [(j, home(2 * j)) for j in range(n)]
    odds = [(j, home(2 * j + 1)) for j in range(n)]

    def per_device(x):
        # Of the chunks d and 2n - 1 - d of device d, exactly one has an even number.
        swapped = lax.axis_index("seq") % 2 == 1
        first, second = jnp.split(x, 2, axis=dim)
        swap = lambda a, b: (jnp.where(swapped, b, a), jnp.where(swapped, a, b))
        if inverse:
            first, second = swap(first, second)
        back = lambda pairs: [(b, a) for a, b in pairs] if inverse else pairs
        first = lax.ppermute(first, "seq", back(evens))
        second = lax.ppermute(second, "seq", back(odds))
        if not inverse:
            first, second = swap(first, second)
        return jnp.concatenate([first, second], axis=dim)

    return everything("zigzag", per_device, P(*entries), P(*entries))(x)


def _check(q, k, v, mask, segment_ids, method, order, sizes) -> None:
    problems = []
    if method not in METHODS:
        problems.append(f'  method: {method!r}; it takes "ring" or "ulysses"')
    if order not in ORDERS:
        problems.append(f'  order: {order!r}; it takes "natural" or "zigzag"')
    shapes = {"q": q, "k": k, "v": v}
    bad = [name for name, x in shapes.items() if x.ndim != 4]
    for name in bad:
        problems.append(
            f"  {name}: shape {shapes[name].shape}; it takes [batch, tokens, heads, size]"
        )
    if not bad:
        problems += _misfits(q, k, v, method, order, sizes)
        for name, x in (("mask", mask), ("segment_ids", segment_ids)):
            if x is not None and x.shape != q.shape[:2]:
                problems.append(
                    f"  {name}: shape {x.shape}; it takes [batch, tokens], {q.shape[:2]}"
                )
    if problems:
        raise ValueError("attention cannot use these arguments:\n" + "\n".join(problems))


def _misfits(q, k, v, method, order, sizes) -> list[str]:
    b, t, heads, size = q.shape
    problems = []
    if k.shape[:2] != (b, t) or k.shape[3] != size or heads % max(k.shape[2], 1):
        problems.append(
            f"  k: shape {k.shape}; to fit q it takes ({b}, {t}, kv_heads, {size}), where "
            f"kv_heads divides {heads}"
        )
    if v.shape[:3] != k.shape[:3]:
        problems.append(f"  v: shape {v.shape}; to fit k its first three are {k.shape[:3]}")
    n = sizes.get("seq", 1)
    rows = ways(some(EXAMPLES, sizes), sizes)
    if b % rows:
        problems.append(
            f"  batch: {b} examples do not divide by data*fsdp={rows}; give {near(b, rows)}"
        )
    pieces = 2 * n if order == "zigzag" and n > 1 else n
    if t % pieces:
        what = f"2 * seq={pieces} (zigzag)" if pieces != n else f"seq={n}"
        problems.append(f"  tokens: {t} do not divide by {what}; give {near(t, pieces)}")
    split = sizes.get("tensor", 1) * (n if method == "ulysses" else 1)
    if k.shape[2] % split:
        over = "tensor" if method != "ulysses" else "seq*tensor"
        fix = "" if method != "ulysses" else ', or method="ring"'
        times = split // math.gcd(k.shape[2], split)
        if heads % (k.shape[2] * times) == 0:
            fix += f", or repeat each: jnp.repeat(k, {times}, axis=2), and v likewise"
        problems.append(
            f"  kv_heads: {k.shape[2]} do not divide by {over}={split}; give "
            f"{near(k.shape[2], split)}{fix}"
        )
    return problems


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_ring(plan: _Plan, q, k, v, segment, mask):
    return _ring_forward(plan, q, k, v, segment, mask)[0]


def _keys(plan: _Plan, k, v, segment, mask) -> Keys:
    me = lax.axis_index("seq") if plan.n > 1 else 0
    return Keys(k, v, _ring.positions(me, plan.n, k.shape[1], plan.order), segment, mask)


def _optional(spec: P, *arrays) -> tuple[P | None, ...]:
    return tuple(None if x is None else spec for x in arrays)


def _ring_forward(plan: _Plan, q, k, v, segment, mask):
    def per_device(q, k, v, segment, mask):
        keys = _keys(plan, k, v, segment, mask)
        out, log = _ring.forward(q, segment, keys, plan.n, plan.causal, plan.order)
        return out.astype(q.dtype), log

    w = plan.whole
    run = everything(
        "attention", per_device, (w, w, w, *_optional(plan.rows, segment, mask)), (w, w)
    )
    out, log = run(q, k, v, segment, mask)
    return out, (q, k, v, segment, mask, out, log)


def _ring_back(plan: _Plan, kept, d_out):
    segment, mask = kept[3:5]

    def per_device(q, k, v, segment, mask, out, log, d_out):
        keys = _keys(plan, k, v, segment, mask)
        dq, dk, dv = _ring.backward(
            q, segment, keys, out, log, d_out, plan.n, plan.causal, plan.order
        )
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    w = plan.whole
    specs = (w, w, w, *_optional(plan.rows, segment, mask), w, w, w)
    return (*everything("attention", per_device, specs, (w, w, w))(*kept, d_out), None, None)


_over_ring.defvjp(_ring_forward, _ring_back)


def _ulysses(plan: _Plan, q, k, v, segment, mask):
    """Tokens for heads, `[b, t.seq, k, ...] -> [b, t, k.seq, ...]`, and back."""

    def per_device(q, k, v, segment, mask):
        n, size = plan.n, q.shape[1]
        swap = lambda x: lax.all_to_all(x, "seq", split_axis=2, concat_axis=1, tiled=True)
        q, k, v = swap(q), swap(k), swap(v)
        position = jnp.concatenate([_ring.positions(i, n, size, plan.order) for i in range(n)])
        causal = jnp.zeros((int(plan.causal), int(plan.order == "natural")))
        out = attend(q, position, segment, Keys(k, v, position, segment, mask), causal)
        return lax.all_to_all(out, "seq", split_axis=1, concat_axis=2, tiled=True)

    w, rows = plan.whole, P(plan.batch)
    specs = (w, w, w, *_optional(rows, segment, mask))
    return everything("attention", per_device, specs, w)(q, k, v, segment, mask)
