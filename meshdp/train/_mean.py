"""A mean that is kept as its sum and its weight until everything has been added up."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Mean(eqx.Module):
    """A sum over examples and the weight to divide it by, both scalars.

    Sums and weights of microbatches and devices add up exactly, where means of unequal parts
    do not; `make_train_step` divides once, at the end.
    """

    total: jax.Array
    """The sum over the examples at hand, of shape `()`."""

    weight: jax.Array
    """How much they count for together, such as the number of unmasked tokens; shape `()`."""

    def __init__(self, total: Any, weight: Any):
        self.total = jnp.asarray(total)
        self.weight = jnp.asarray(weight)

    @staticmethod
    def of(values: Any, mask: Any = None) -> "Mean":
        """The mean of `values`, of those where `mask` is set, or weighted by it.

        **Arguments:**

        - `values`: an array of any shape; sums are taken in float32 at least.
        - `mask`: `None`, or an array that broadcasts to the shape of `values` without adding
            dimensions in front: `[batch]` weighs whole examples of values `[batch, tokens]`.
            Booleans or numbers. Where it is 0, `values` may be anything, NaN included, and
            get no gradient. (The model's input may not: on the way back 0 times a NaN is one,
            so pad with rows that were really seen, as `pad_batch` does.)

        **Raises:**

        - `ValueError`: if the mask does not fit the values.
        """
        values = jnp.asarray(values)
        wide = jnp.promote_types(values.dtype, jnp.float32)
        if mask is None:
            return Mean(values.sum(dtype=wide), jnp.asarray(values.size, wide))
        mask = jnp.asarray(mask)
        lead = mask.shape + (1,) * (values.ndim - mask.ndim)
        if mask.ndim > values.ndim or any(
            m not in (1, v) for m, v in zip(lead, values.shape, strict=True)
        ):
            fits = " or ".join(map(str, dict.fromkeys((values.shape, values.shape[:1]))))
            raise ValueError(
                f"Mean.of got values of shape {values.shape} and a mask of shape {mask.shape} "
                "(in a step, those of one device's examples). Give one weight per value, or "
                f"one for each of the leading dimensions: shape {fits}."
            )
        mask = jnp.broadcast_to(mask.reshape(lead), values.shape)
        kept = jnp.where(mask.astype(bool), values, 0).astype(wide)
        weights = mask.astype(wide)
        return Mean((kept * weights).sum(), weights.sum())

    def value(self) -> jax.Array:
        """`total / weight`: NaN where nothing counted."""
        return self.total / self.weight
