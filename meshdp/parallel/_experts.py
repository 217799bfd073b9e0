"""Mixture of experts: a router, and experts that lie on different devices."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ._axes import (
    EXAMPLES,
    everything,
    examples,
    here,
    near,
    outside,
    refuse_manual,
    refuse_others,
    some,
    ways,
)
from ._dispatch import blocks, each_block, inverse, move, ranks

AXIS = "expert"
TOKENS = ("seq", AXIS, "tensor")
"""The axes that share out the tokens among the devices of one group of examples."""


class Routing(eqx.Module):
    """Which experts each token goes to; made by `route`."""

    ids: Array
    """`[batch, tokens, top_k]`, the experts, best first; integers."""

    weights: Array
    """`[batch, tokens, top_k]`, what each counts for in the result, float32."""

    load_balance: Array
    """Scalar: 1 when all experts get alike, up to the number of experts (Fedus et al. 2021,
    equation 4). Over the global batch: the same on every device."""

    z: Array
    """Scalar: the mean of the squared log-sum-exp of the logits (Zoph et al. 2022, equation
    5), over the global batch."""

    load: Array
    """`[experts]`: the share of all choices that each gets; sums to 1. No gradient."""

    mask: Array | None
    """`[batch, tokens]`, which tokens count."""


def route(
    logits: Array, top_k: int, *, mask: Array | None = None, renormalize: bool = True
) -> Routing:
    """Chooses the `top_k` experts of each token, and computes the router's two losses.

    Inside `make_train_step` the losses are summed over the devices that hold the examples, so
    they are exact for the global batch (with `accumulate`, for each microbatch of it). Add
    them to the loss with its weight: `Mean(total + 0.01 * routing.load_balance * weight,
    weight)`.

    **Arguments:**

    - `logits`: `[batch, tokens, experts]`.
    - `top_k`: experts per token.
    - `mask`: `[batch, tokens]`, false for padding: it is sent nowhere and counts in no loss.
    - `renormalize`: whether a token's weights sum to 1; if not, they are its probabilities.

    **Raises:**

    - `ValueError`: if a shape or `top_k` does not fit.
    """
    more = {} if mask is None else {"mask": mask}
    refuse_others("route", logits=logits, **more)
    problems = []
    if logits.ndim != 3:
        problems.append(f"  logits: shape {logits.shape}; it takes [batch, tokens, experts]")
    elif (
        isinstance(top_k, bool)
        or not isinstance(top_k, int)
        or not (1 <= top_k <= logits.shape[-1])
    ):
        problems.append(
            f"  top_k: {top_k!r}; it takes a whole number from 1 to the {logits.shape[-1]} "
            "experts"
        )
    if mask is not None and mask.shape != logits.shape[:-1]:
        problems.append(f"  mask: shape {mask.shape}; it takes {logits.shape[:-1]}")
    if problems:
        raise ValueError("route cannot use these arguments:\n" + "\n".join(problems))
    logits = logits.astype(jnp.float32)
    experts = logits.shape[-1]
    shares = jax.nn.softmax(logits)
    ids = _best(shares, top_k)
    one_hot = ids[..., None] == jnp.arange(experts).reshape(1, 1, 1, -1)
    weights = jnp.where(one_hot, shares[..., None, :], 0).sum(-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    counts = jnp.ones(logits.shape[:-1]) if mask is None else (mask != 0).astype(jnp.float32)
    chosen = (one_hot.any(-2) * counts[..., None]).sum((0, 1))
    share = (shares * counts[..., None]).sum((0, 1))
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * counts).sum()
    tokens = counts.sum()
    if outside():
        chosen, share, z, tokens = lax.psum((chosen, share, z, tokens), outside())
    tokens = jnp.maximum(tokens, 1)
    load = lax.stop_gradient(chosen / (tokens * top_k))
    return Routing(
        ids=ids,
        weights=weights,
        load_balance=experts * (load * share / tokens).sum(),
        z=z / tokens,
        load=load,
        mask=mask,
    )


def _best(shares: Array, top_k: int) -> Array:
    """Each device's own: left to the compiler, `top_k` gathers the tokens of all of them."""
    sizes = here()
    batch = examples(shares.shape[0], sizes)
    batch = None if shares.shape[0] % ways(batch, sizes) else batch
    tokens = _tokens(batch, sizes)
    tokens = None if shares.shape[1] % ways(tokens, sizes) else tokens
    spec = P(batch, tokens)
    best = lambda x: lax.top_k(x, top_k)[1]
    return everything("route", best, (spec,), spec)(lax.stop_gradient(shares))


def _tokens(batch: tuple[str, ...] | None, sizes: dict[str, int]) -> tuple[str, ...] | None:
    return some([a for a in TOKENS if a not in (batch or ())], sizes)


@dataclasses.dataclass(frozen=True)
class Rows:
    """How an expert's function multiplies: each row by the weights of its own expert.

    Given to the function as its last argument. A row is a token; which rows belong to which
    expert, and of how many experts there are rows, is none of the function's business.
    """

    _dot: Callable
    _each: Callable

    def dot(self, x: Array, weight: Array) -> Array:
        """`[rows, in]` by `[experts, in, out]`: `[rows, out]`."""
        if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
            raise ValueError(
                f"rows.dot takes rows [rows, in] and a weight [experts, in, out], but their "
                f"shapes are {x.shape} and {weight.shape} (of the experts that are together "
                "here). For a bias [experts, out] use rows.each."
            )
        return self._dot(x, weight)

    def each(self, value: Array) -> Array:
        """A bias `[experts, out]` as `[rows, out]`."""
        if value.ndim != 2:
            raise ValueError(
                f"rows.each takes a bias [experts, out], but its shape is {value.shape} (of "
                "the experts that are together here). For a weight use rows.dot."
            )
        return self._each(value)


def experts(
    f: Callable[[Any, Array, Rows], Array],
    params: Any,
    x: Array,
    routing: Routing,
    *,
    capacity: float | None = 1.25,
) -> tuple[Array, Array]:
    """Applies to each token its experts, which lie over the mesh axis `"expert"`.

    ```python
    def expert(params, x, rows):  # x: [rows, width]
        hidden = jax.nn.gelu(rows.dot(x, params.up) + rows.each(params.bias))
        return rows.dot(hidden, params.down)

    routing = route(x @ router, top_k=2)
    y, dropped = experts(expert, params, x, routing)
    ```

    Under a mesh each device has its share of the tokens (examples are split over `"expert"`
    too, or tokens are where examples do not divide, and tokens over `"seq"` and `"tensor"`),
    sends them to the devices of their experts by one all-to-all and gets the results back by
    another (GShard, Lepikhin et al. 2020).

    **Arguments:**

    - `f`: `f(params, x, rows)`, for all experts at once; `rows` multiplies.
    - `params`: a pytree of arrays whose first dimension is the expert; split it over
        `"expert"`. Inside they are whole along `"tensor"`.
    - `x`: `[batch, tokens, width]` (global shape).
    - `routing`: from `route`.
    - `capacity`: an expert takes from each device up to `capacity * top_k * tokens / experts`
        of the device's tokens (rounded up), those of the first choices and the first tokens
        first; the rest is dropped and adds 0 to the result. `None` drops nothing: rows are
        put together by expert and go through `f` in blocks, as many as there are rows for
        (as in MegaBlocks, Gale et al. 2022), and the backward pass computes `f` anew. As
        shapes are fixed, what is sent and received has room for the worst case, all tokens
        of a group on one device; what is inside `f` has not.

    **Returns:**

    `(y, dropped)`: `[batch, tokens, width of f's result]`, and how many choices were dropped,
    an integer over the global batch.

    **Raises:**

    - `ValueError`: naming every size that does not divide, or what `f` returns instead of a
        row for each row.
    - `TypeError`: if `routing` does not come from `route`.
    """
    refuse_manual("experts", AXIS)
    if not isinstance(routing, Routing):
        raise TypeError(
            f"experts takes routing from meshdp.parallel.route, not {type(routing).__name__}."
        )
    refuse_others("experts", x=x)
    sizes = here()
    count = _check(params, x, routing, capacity, sizes)
    mask = routing.mask
    top_k = routing.ids.shape[-1]
    n = sizes.get(AXIS, 1)
    batch = examples(x.shape[0], sizes)
    tokens = _tokens(batch, sizes)
    shared = x.shape[0] * x.shape[1] // (ways(batch, sizes) * ways(tokens, sizes))
    if capacity is None:
        run = partial(_dropless, f, n, count)
    else:
        slots = min(math.ceil(capacity * top_k * shared / count), shared)
        run = partial(_with_capacity, f, n, count, slots)

    def per_device(params, x, ids, weights, mask):
        rows = x.reshape(-1, x.shape[-1])
        ids = ids.reshape(-1, top_k)
        if mask is not None:  # an expert that is not there
            ids = jnp.where(mask.reshape(-1, 1) != 0, ids, count)
        y, dropped = run(params, rows, ids, weights.reshape(-1, top_k))
        dropped = lax.psum(dropped, (*(batch or ()), *(tokens or ())))
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype), dropped

    spec = P(batch, tokens)
    each = jax.tree.map(lambda _: P(some((AXIS,), sizes)), params)
    specs = (each, spec, spec, spec, None if mask is None else spec)
    y, dropped = everything("experts", per_device, specs, (spec, P()))(
        params, x, routing.ids, routing.weights, mask
    )
    if outside():
        dropped = lax.psum(dropped, outside())
    return y, dropped


def _check(params, x, routing, capacity, sizes) -> int:
    problems = []
    leaves = jax.tree.leaves(params)
    firsts = sorted({leaf.shape[:1] for leaf in leaves})
    count = routing.load.shape[0]
    if firsts != [(count,)]:
        problems.append(
            f"  params: first dimensions {', '.join(str(s) for s in firsts) or 'none'}; the "
            f"router has {count} experts, so each takes ({count}, ...)"
        )
    if x.ndim != 3 or x.shape[:2] != routing.ids.shape[:2]:
        problems.append(
            f"  x: shape {x.shape}; the routing is of {routing.ids.shape[:2]}, so it takes "
            "[batch, tokens, width] of these"
        )
    else:
        rows = ways(some(EXAMPLES, sizes), sizes)
        names = _tokens(examples(x.shape[0], sizes), sizes)
        split = ways(names, sizes)
        if x.shape[0] % rows:
            problems.append(
                f"  batch: {x.shape[0]} examples do not divide by data*fsdp={rows}; give "
                f"{near(x.shape[0], rows)}"
            )
        if x.shape[1] % split:
            problems.append(
                f"  tokens: {x.shape[1]} do not divide by {'*'.join(names or ())}={split}; "
                f"give {near(x.shape[1], split)}"
            )
    if count % sizes.get(AXIS, 1):
        problems.append(
            f"  experts: {count} do not divide by expert={sizes[AXIS]}; give "
            f"{near(count, sizes[AXIS])}"
        )
    if capacity is not None and not (_is_number(capacity) and capacity > 0):
        problems.append(f"  capacity: {capacity!r}; it takes a number above 0, or None")
    if problems:
        raise ValueError("experts cannot use these arguments:\n" + "\n".join(problems))
    return count


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _swap(x: Array, n: int) -> Array:
    """`[n, ...]`, one part for each device: each gets what the others have for it."""
    return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0) if n > 1 else x


def _sent(x: Array, ids: Array, at: Array, places: int, count: int):
    """The rows at their places, and which choice each is. Choices are `[top_k * rows]`."""
    rows, choices = x.shape[0], ids.shape[0]
    choice = inverse(at, places)
    real = jnp.argmax(ids < count)
    source = jnp.where(choice < choices, choice, real) % rows
    return move(x, source, at.reshape(-1, rows)), choice


def _returned(back: Array, at: Array, choice: Array, there: Array, weights: Array) -> Array:
    """The weighted sum of what came back for each token."""
    rows, top_k = weights.shape
    each = move(back, jnp.minimum(at, back.shape[0] - 1), choice[None])
    each = jnp.where(there[:, None], each, 0)
    return (each.reshape(top_k, rows, -1) * weights.T[..., None]).sum(0)


def _with_capacity(f, n, count, slots, params, x, ids, weights):
    """Each device has `slots` places in each expert."""
    # First choices of all tokens come before second choices.
    flat = ids.T.reshape(-1)
    place, _ = ranks(flat, count)
    kept = (flat < count) & (place < slots)
    at = jnp.where(kept, flat * slots + place, count * slots)
    sent, choice = _sent(x, flat, at, count * slots, count)
    # [experts, slots, d] -> [n, own experts, slots, d] -> [own experts, n * slots, d]
    own = count // n
    got = _swap(sent.reshape(n, own, slots, -1), n)
    got = got.transpose(1, 0, 2, 3).reshape(own * n * slots, -1)

    def dot(x, weight):
        y = jnp.einsum("erd,edh->erh", x.reshape(own, -1, x.shape[-1]), weight)
        return y.reshape(-1, y.shape[-1])

    each = lambda value: jnp.repeat(value, n * slots, axis=0, total_repeat_length=len(got))
    done = _apply(f, params, got, Rows(dot, each))
    done = done.reshape(own, n, slots, -1).transpose(1, 0, 2, 3)
    back = _swap(done, n).reshape(count * slots, -1)
    dropped = ((flat < count) & ~kept).sum()
    return _returned(back, at, choice, kept, weights), dropped


def _dropless(f, n, count, params, x, ids, weights):
    """A device sends to each other its rows, by expert, in a buffer for all of them."""
    rows, top_k = ids.shape
    own = count // n
    slots = rows * min(top_k, own)  # a token goes to an expert once
    flat = ids.T.reshape(-1)
    there = flat < count
    place, counts = ranks(flat, count)
    counts = counts.reshape(n, own)
    start = (jnp.cumsum(counts, 1) - counts).reshape(-1)
    expert = jnp.minimum(flat, count - 1)
    at = jnp.where(there, expert // own * slots + start[expert] + place, n * slots)
    sent, choice = _sent(x, flat, at, n * slots, count)
    got = _swap(sent.reshape(n, slots, -1), n).reshape(n * slots, -1)
    plan = blocks(_swap(counts, n), slots, rows * n * top_k // count)

    spread = lambda value: jnp.broadcast_to(value, (plan.source.shape[1], value.shape[-1]))
    block = Rows(lambda x, weight: x @ weight[0], spread)
    done = each_block(lambda params, x: _apply(f, params, x, block), params, got, plan)
    back = _swap(done.reshape(n, slots, -1), n).reshape(n * slots, -1)
    return _returned(back, at, choice, there, weights), jnp.zeros((), jnp.int32)


def _apply(f, params, x, rows: "Rows"):
    y = f(params, x, rows)
    if getattr(y, "ndim", 0) != 2 or y.shape[0] != x.shape[0]:
        what = f"an array of shape {y.shape}" if hasattr(y, "shape") else repr(y)
        raise ValueError(
            f"experts: f was given {x.shape[0]} rows of shape {x.shape[1:]} and returned "
            f"{what}. Return one row for each: [rows, width]."
        )
    return y
