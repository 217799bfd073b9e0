"""Image classification in the style of Flax's ImageNet example: replicate, shard, pmean."""

import functools

import flax.jax_utils as jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils
from jax import lax

LEARNING_RATE = 0.1


def cross_entropy_loss(logits, labels):
    one_hot = jax.nn.one_hot(labels, 4)
    return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1))


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def train_step(state, batch):
    """One step of SGD with momentum."""

    def loss_fn(params):
        logits = batch["image"] @ params["w"] + params["b"][None]
        return cross_entropy_loss(logits, batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    grads = lax.pmean(grads, axis_name="batch")
    optimizer = optax.sgd(LEARNING_RATE, momentum=0.9)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = jax.tree_multimap(lambda p, u: p + u, state["params"], updates)
    metrics = lax.pmean({"loss": loss}, axis_name="batch")
    return {"params": params, "opt_state": opt_state}, metrics


def main():
    data = np.random.default_rng(0)
    params = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}
    state = {"params": params, "opt_state": optax.sgd(LEARNING_RATE, 0.9).init(params)}
    # One copy for each device.
    state = jax_utils.replicate(state)

    losses = []
    for _ in range(3):
        batch = {
            "image": data.normal(size=(16, 6)).astype(np.float32),
            "label": data.integers(0, 4, size=16),
        }
        batch = common_utils.shard(batch)  # [16, ...] -> [8, 2, ...]
        state, metrics = train_step(state, batch)
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))

    state = jax_utils.unreplicate(state)
    count = len(jax.tree_leaves(state["params"]))
    return {"losses": losses, "w": state["params"]["w"], "leaves": count}
