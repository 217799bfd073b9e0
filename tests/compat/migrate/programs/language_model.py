"""A bigram language model, trained in the style of the first GPT examples for TPUs."""

import jax
import jax.numpy as jnp
import jax.tools.colab_tpu
import numpy as np
import optax
from jax.config import config
from jax.lib import xla_bridge

jax.tools.colab_tpu.setup_tpu()
config.update("jax_pmap_shmap_merge", True)

VOCABULARY = 8
optimizer = optax.adam(0.05, eps=1e-2)


def loss_fn(params, tokens):
    logits = params["table"][tokens[:, :-1]]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def update(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    grads = jax.lax.pmean(grads, axis_name="devices")
    loss = jax.lax.pmean(loss, axis_name="devices")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


def main():
    n_devices = jax.device_count()
    backend = xla_bridge.get_backend().platform
    params = {"table": jnp.zeros((VOCABULARY, VOCABULARY))}
    opt_state = optimizer.init(params)
    params = jax.device_put_replicated(params, jax.devices())
    opt_state = jax.device_put_replicated(opt_state, jax.devices())
    p_update = jax.pmap(update, axis_name="devices", donate_argnums=(0, 1))

    data = np.random.default_rng(10)
    trace = []
    for step in range(4):
        tokens = data.integers(0, VOCABULARY, size=(16, 6))
        tokens = tokens.reshape((n_devices, -1) + tokens.shape[1:])
        params, opt_state, loss = p_update(params, opt_state, tokens)
        if step % 2 == 0:
            trace.append(float(loss[0]))  # the same on every device
    params = jax.tree_map(lambda x: x[0], params)
    return {"table": params["table"], "losses": trace, "backend": len(backend)}
