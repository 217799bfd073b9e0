"""Whether an optimizer makes of each parameter an update of its shape."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu


def check_scalar_rates(optimizer: Any, params: Any) -> None:
    """Asks for the updates of single numbers, which nothing but a learning rate can widen.

    Only shapes are computed. Of larger parameters a schedule that returns `[n]` would scale
    each of n columns differently, and say nothing.

    **Raises:**

    - `ValueError`: if an update is not a single number.
    """
    single = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)

    def updates(p, loss):
        return optimizer.update(p, optimizer.init(p), p, value=loss)[0]

    try:
        found = jax.eval_shape(updates, single, loss)
    except Exception:
        # One that works on matrices only, or needs more than a step has: nothing is known.
        return
    wide = [(path, x) for path, x in jtu.tree_leaves_with_path(found) if x.shape]
    if not wide:
        return
    path, x = wide[0]
    more = f", and likewise {len(wide) - 1} more" if len(wide) > 1 else ""
    raise ValueError(
        "The learning rate, or its schedule, is not one number: of a single number in place of "
        f"model{jtu.keystr(path)} the optimizer makes an update of shape {x.shape}{more}. "
        "Let the schedule return a scalar, as optax.cosine_decay_schedule(1e-3, 1000) does."
    )
