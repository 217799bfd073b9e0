"""Transformer parts split over the mesh axis `"tensor"`: the fewest collectives there can be.

Megatron's half blocks (Shoeybi et al. 2019): weights split by columns, then by rows, and one
sum over `"tensor"` after them; in the backward pass one more before them. With
`sequence=True` the activations between the half blocks are split along the tokens, and each
sum becomes a reduce-scatter and an all-gather (Korthikanti et al. 2022).

The pieces are multiplied inside a `shard_map` rather than under a constraint: the compiler
would sum the gradients of the input once for each of several weights.
"""

from typing import Any

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
    refuse_manual,
    refuse_others,
    some,
    total,
    ways,
)

AXIS = "tensor"


def _spec(
    x: Array,
    ndim: int,
    sizes: dict[str, int],
    *,
    tokens: tuple[str, ...] = ("seq",),
    last=False,
) -> P:
    """`[batch, tokens, ..., width]`, or `[batch, width]`; the batch is that of `x`."""
    middle = [some(tokens, sizes)] + [None] * (ndim - 3) if ndim > 2 else []
    width = some((AXIS,), sizes) if last else None
    return P(examples(x.shape[0], sizes), *middle, width)


def _arrays(who: str, layer: Any, axis: int) -> tuple[Array, Array | None]:
    weight, bias = getattr(layer, "weight", layer), getattr(layer, "bias", None)
    n = here().get(AXIS, 1)
    if getattr(weight, "ndim", 0) != 2:
        what = f"an array of shape {weight.shape}" if hasattr(weight, "shape") else repr(layer)
        raise ValueError(
            f"{who} takes equinox.nn.Linear layers or weights of shape [out, in], not {what}."
        )
    if weight.shape[axis] % n:
        what = ("outputs", "inputs")[axis]
        raise ValueError(
            f"{who}: {weight.shape[axis]} {what} of a weight of shape {weight.shape} do not "
            f"divide by tensor={n}. Use {near(weight.shape[axis], n)}."
        )
    return weight, bias


def _check_width(who: str, x: Array, weight: Array) -> None:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{who}: x has the shape {x.shape}, but a weight of shape {weight.shape} takes "
            f"{weight.shape[1]} in the last dimension. Weights are [out, in]."
        )


def _check_integers(who: str, name: str, x: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{who} takes {name} as integers, but their dtype is {x.dtype}. Use "
            f"{name}.astype(jnp.int32)."
        )


def _check_tokens(who: str, x: Array, sizes: dict[str, int], sequence: bool) -> None:
    refuse_others(who, x=x)
    if x.ndim < 2 or (sequence and x.ndim < 3):
        shape = "[batch, tokens, width]" + ("" if sequence else " or [batch, width]")
        raise ValueError(f"{who} takes x of shape {shape}, but its shape is {x.shape}.")
    rows = ways(some(EXAMPLES, sizes), sizes)
    problems = []
    if x.shape[0] % rows:
        problems.append(
            f"  batch: {x.shape[0]} examples do not divide by data*fsdp={rows}; give "
            f"{near(x.shape[0], rows)}"
        )
    if x.ndim > 2:
        names = ("seq", AXIS) if sequence else ("seq",)
        n = ways(some(names, sizes), sizes)
        if x.shape[1] % n:
            problems.append(
                f"  tokens: {x.shape[1]} do not divide by {'*'.join(names)}={n}; give "
                f"{near(x.shape[1], n)}"
            )
    if problems:
        raise ValueError(f"{who} cannot split x:\n" + "\n".join(problems))


def columns(x: Array, *layers: Any, sequence: bool = False) -> tuple[Array, ...]:
    """Applies linear layers whose outputs are split over `"tensor"`; the first half.

    No communication forward, one all-reduce backward, however many layers read `x` (queries,
    keys and values; gate and up). Without a mesh, `x @ weight.T + bias` for each.

    **Arguments:**

    - `x`: `[batch, tokens, in]`, or `[batch, in]` (global shapes).
    - `layers`: `equinox.nn.Linear`s, or weights `[out, in]`; `"tensor"` must divide `out`.
    - `sequence`: whether the tokens of `x` are split over `"tensor"` too, as `row` with
        `sequence` leaves them: an all-gather forward and a reduce-scatter backward.

    **Returns:**

    One `[batch, tokens, out]` for each layer, split over `"tensor"` along `out`.

    **Raises:**

    - `ValueError`: if a size does not divide.
    """
    refuse_manual("columns", AXIS)
    sizes = here()
    _check_tokens("columns", x, sizes, sequence)
    arrays = [_arrays("columns", layer, 0) for layer in layers]
    for weight, _ in arrays:
        _check_width("columns", x, weight)
    split = AXIS in sizes

    def per_device(x, arrays):
        if sequence and split:
            x = lax.all_gather(x, AXIS, axis=1, tiled=True)
        return tuple(_linear(x, weight, bias) for weight, bias in arrays)

    tokens = ("seq", AXIS) if sequence else ("seq",)
    spec = P(some((AXIS,), sizes))
    specs = [(spec, None if bias is None else spec) for _, bias in arrays]
    run = everything(
        "columns",
        per_device,
        (_spec(x, x.ndim, sizes, tokens=tokens), specs),
        (_spec(x, x.ndim, sizes, last=True),) * len(arrays),
    )
    return run(x, arrays)


def row(x: Array, layer: Any, *, sequence: bool = False) -> Array:
    """Applies a linear layer whose inputs are split over `"tensor"`; the second half.

    One all-reduce forward, no communication backward. Without a mesh, `x @ weight.T + bias`.

    **Arguments:**

    - `x`: `[batch, tokens, in]`, or `[batch, in]` (global shapes), as `columns` leaves it.
    - `layer`: an `equinox.nn.Linear`, or a weight `[out, in]`; `"tensor"` must divide `in`.
    - `sequence`: whether the tokens of the result are split over `"tensor"`, so that norms
        and residuals are computed once: a reduce-scatter forward, an all-gather backward.

    **Raises:**

    - `ValueError`: if a size does not divide.
    """
    refuse_manual("row", AXIS)
    sizes = here()
    _check_tokens("row", x, sizes, sequence)
    weight, bias = _arrays("row", layer, 1)
    _check_width("row", x, weight)
    n = sizes.get(AXIS, 1)

    def per_device(x, weight, bias):
        y: Any = _linear(x, weight, None)
        if n > 1:
            if sequence:
                y = lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)
            else:
                y = total(y, AXIS, n)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))

    tokens = ("seq", AXIS) if sequence else ("seq",)
    run = everything(
        "row",
        per_device,
        (
            _spec(x, x.ndim, sizes, last=True),
            P(None, some((AXIS,), sizes)),
            None if bias is None else P(),
        ),
        _spec(x, x.ndim, sizes, tokens=tokens),
    )
    return run(x, weight, bias)


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    y = (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def embed(table: Any, tokens: Array) -> Array:
    """Looks tokens up in a table whose rows are split over `"tensor"`.

    One all-reduce forward, none backward over `"tensor"`.

    **Arguments:**

    - `table`: `[vocabulary, width]`, or an `equinox.nn.Embedding`; `"tensor"` must divide the
        vocabulary.
    - `tokens`: `[batch, tokens]` integers (global shape).

    **Returns:**

    `[batch, tokens, width]`.
    """
    refuse_manual("embed", AXIS)
    refuse_others("embed", tokens=tokens)
    _check_integers("embed", "tokens", tokens)
    table, _ = _arrays("embed", table, 0)
    sizes = here()
    _check_tokens("embed", jnp.expand_dims(tokens, -1), sizes, False)
    # As `table[tokens]` on one device has it: from the end, or else the nearest.
    size = table.shape[0]
    tokens = jnp.clip(jnp.where(tokens < 0, tokens + size, tokens), 0, size - 1)
    if AXIS not in sizes:
        return table[tokens]
    n = sizes[AXIS]

    def per_device(table, tokens):
        at = tokens - lax.axis_index(AXIS) * table.shape[0]
        mine = (at >= 0) & (at < table.shape[0])
        rows = table[jnp.where(mine, at, 0)]
        return total(jnp.where(mine[..., None], rows, 0), AXIS, n)

    out = _spec(tokens, tokens.ndim + 1, sizes)
    return everything("embed", per_device, (P(AXIS), P(*out[:-1])), out)(table, tokens)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The cross-entropy of logits whose classes are split over `"tensor"`, never gathered.

    As `optax.softmax_cross_entropy_with_integer_labels`. Two small all-reduces forward (the
    largest logit; the sum of exponentials with the label's logit), none backward.

    **Arguments:**

    - `logits`: `[batch, tokens, classes]`, or `[batch, classes]` (global shape), as
        `columns(x, head)` leaves them; `"tensor"` must divide the classes.
    - `labels`: `[batch, tokens]` or `[batch]` integers.

    **Returns:**

    Losses, of the shape of `labels`, in float32. Where a label is negative (-1, -100), the
    token is to be ignored: 0, without a gradient. Where it is past the last class: NaN.

    **Raises:**

    - `ValueError`: if the shapes do not fit, or a size does not divide.
    """
    refuse_manual("cross_entropy", AXIS)
    refuse_others("cross_entropy", logits=logits, labels=labels)
    _check_integers("cross_entropy", "labels", labels)
    sizes = here()
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy takes one label for each row of logits, but logits have the shape "
            f"{logits.shape} and labels {labels.shape}. Give labels of shape "
            f"{logits.shape[:-1]}."
        )
    _check_tokens("cross_entropy", logits, sizes, False)
    n = sizes.get(AXIS, 1)
    if logits.shape[-1] % n:
        raise ValueError(
            f"cross_entropy: {logits.shape[-1]} classes do not divide by tensor={n}. Use "
            f"{near(logits.shape[-1], n)}: pad the vocabulary."
        )
    return _entropy(logits, labels)


@jax.custom_vjp
def _entropy(logits, labels):
    return _entropy_forward(logits, labels)[0]


def _entropy_specs(logits, sizes):
    whole = _spec(logits, logits.ndim, sizes, last=True)
    return whole, P(*whole[:-1])


def _chosen(logits, labels, n: int):
    """Where in this device's classes the label is, as a mask."""
    size = logits.shape[-1]
    at = labels - (lax.axis_index(AXIS) * size if n > 1 else 0)
    return at[..., None] == jnp.arange(size).reshape((1,) * labels.ndim + (-1,))


def _entropy_forward(logits, labels):
    sizes = here()
    n = sizes.get(AXIS, 1)

    def per_device(logits, labels):
        wide = logits.astype(jnp.float32)
        top = wide.max(-1)
        top = lax.pmax(top, AXIS) if n > 1 else top
        weight = jnp.exp(wide - top[..., None]).sum(-1)
        label = jnp.where(_chosen(logits, labels, n), wide, 0).sum(-1)
        if n > 1:
            weight, label = lax.psum(jnp.stack([weight, label]), AXIS)
        log = top + jnp.log(weight)
        loss = jnp.where(labels < n * logits.shape[-1], log - label, jnp.nan)
        return jnp.where(labels < 0, 0, loss), log

    whole, rows = _entropy_specs(logits, sizes)
    loss, log = everything("cross_entropy", per_device, (whole, rows), (rows, rows))(
        logits, labels
    )
    return loss, (logits, labels, log)


def _entropy_back(kept, d_loss):
    sizes = here()
    n = sizes.get(AXIS, 1)

    def per_device(logits, labels, log, d_loss):
        shares = jnp.exp(logits.astype(jnp.float32) - log[..., None])
        d_loss = jnp.where(labels < 0, 0, d_loss)
        slope = (shares - _chosen(logits, labels, n)) * d_loss[..., None]
        return slope.astype(logits.dtype)

    logits, labels, log = kept
    whole, rows = _entropy_specs(logits, sizes)
    run = everything("cross_entropy", per_device, (whole, rows, rows, rows), whole)
    return run(logits, labels, log, d_loss), None


_entropy.defvjp(_entropy_forward, _entropy_back)
