"""A running average of the parameters, kept where each device keeps its share of them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .. import _tree
from ._state import TrainState


class EmaState(NamedTuple):
    """The average of the parameters, of the parameters' own structure."""

    average: Any


def ema(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of the parameters; the last link of a chain.

    `optax.chain(optax.adamw(3e-4), meshdp.ema(0.999))`. The average lies in the optimizer's
    state, and so as that does: split over the mesh like the parameters, and with
    `shard_update` over `"data"` too. It starts at the first parameters. Updates pass through.
    The average of smaller types is kept in float32, as its steps are too small for them.

    **Raises:**

    - `ValueError`: if `decay` is not from 0 to below 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema takes a decay from 0 to below 1, such as 0.999, not {decay!r}.")

    def init(params):
        # Copies, as the state is donated beside the parameters.
        return EmaState(jax.tree.map(_wide, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "ema needs the parameters: optimizer.update(grads, state, params)."
            )
        new = optax.apply_updates(params, updates)
        mix = lambda a, p: decay * a + (1 - decay) * p
        return updates, EmaState(jax.tree.map(mix, state.average, new))

    return optax.GradientTransformation(init, update)


def _wide(x: Any) -> Any:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else jnp.copy(x)


def ema_model(state: TrainState) -> Any:
    """The model of a state with the average in place of what trains.

    Each array has the type of the parameter, and still lies as the optimizer's state does;
    `meshdp.reshard` moves it.

    **Raises:**

    - `ValueError`: if the optimizer keeps no average.
    """
    is_ema = lambda x: isinstance(x, EmaState)
    found = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_ema) if is_ema(x)]
    if not found:
        raise ValueError(
            "The optimizer of this state keeps no average. Make it with "
            "optax.chain(optimizer, meshdp.ema(0.999))."
        )
    arrays = eqx.filter(found[0].average, _tree.is_array)
    as_kept = lambda a, p: a if a is None else a.astype(p.dtype)
    arrays = jax.tree.map(as_kept, arrays, state.model, is_leaf=lambda x: x is None)
    return eqx.combine(arrays, state.model)
