"""A population, a member on each device; the worst copy the best."""

import jax
import jax.numpy as jnp
import numpy as np


def train(params, lr, x, y):
    def loss_fn(params):
        return jnp.mean((x @ params["w"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree_map(lambda p, g: p - lr * g, params, grads), loss


p_train = jax.pmap(train, in_axes=(0, 0, None, None))
# Members along the last dimension, as the plots want them.
p_predict = jax.pmap(lambda params, x: x @ params["w"], in_axes=(0, None), out_axes=-1)


def main():
    data = np.random.default_rng(5)
    x = data.normal(size=(12, 4)).astype(np.float32)
    y = (x @ np.array([1, -1, 2, 0], np.float32)).astype(np.float32)
    params = {"w": jnp.asarray(data.normal(size=(8, 4)).astype(np.float32))}
    lrs = jnp.linspace(0.01, 0.2, 8)
    for _ in range(3):
        params, losses = p_train(params, lrs, x, y)
        order = np.argsort(jax.device_get(losses))
        parents = np.where(np.arange(8) < 6, order, order[:8] % 8)
        parents[-2:] = order[:2]
        params = jax.tree_map(lambda w, rows=parents: w[rows], params)
    return {"w": params["w"], "losses": losses, "predictions": p_predict(params, x)}
