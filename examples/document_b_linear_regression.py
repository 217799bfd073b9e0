"""Document B, steps 2 to 4 and case 1: linear regression, in both styles.

Runs in a few seconds on eight forced CPU devices; the loss falls below 1e-6.

Repaired: `learning_rate` and `loss_fn` are not defined in the listing, and JAX has removed
`jax.tree_multimap`, `jax.device_put_sharded` and `jax.device_put_replicated`; `compat` has all
three. (`python -m compat run` needs not even that: it puts them back into `jax`.)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import compat
import meshdp
from meshdp.testing import force_devices

force_devices(8)

batch_size = 128  # examples per device and step
num_epochs, batches = 3, 15
learning_rate = 0.1


def init_params(rng):
    weights_key, bias_key = jax.random.split(rng)
    weight = jax.random.normal(weights_key, ())
    bias = jax.random.normal(bias_key, ())
    return {"weight": weight, "bias": bias}


def losses(params, xs, ys):
    return (xs * params["weight"] + params["bias"] - ys) ** 2


# Style 1: pmap, as printed but for the three names.
@functools.partial(compat.pmap, axis_name="batch")
def update(params, xs, ys):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(losses(p, xs, ys)))(params)
    grads = compat.pmean(grads, axis_name="batch")
    loss = compat.pmean(loss, axis_name="batch")
    new_params = compat.tree_multimap(lambda p, g: p - g * learning_rate, params, grads)
    return new_params, loss


def main():
    devices = jax.devices()
    xs = np.random.default_rng(0).normal(size=(len(devices), batch_size, 1))
    xs = xs.astype(np.float32)
    ys = xs * 2 + 1
    params = init_params(jax.random.key(0))
    replicated = compat.device_put_replicated(params, devices)

    # Style 2: mesh. Sums and weights, divided once; the optimizer takes the step.
    mean = lambda params, batch, keys: meshdp.Mean.of(losses(params, batch["x"], batch["y"]))
    step = meshdp.make_train_step(mean, optax.sgd(learning_rate))
    state = step.init(init_params, jax.random.key(0))
    batch = {"x": xs.reshape(-1, 1), "y": ys.reshape(-1, 1)}

    for epoch in range(num_epochs):
        for _ in range(batches):
            xs_sharded = compat.device_put_sharded(list(xs), devices)
            ys_sharded = compat.device_put_sharded(list(ys), devices)
            replicated, loss = update(replicated, xs_sharded, ys_sharded)
            state, metrics = step(state, batch)
        np.testing.assert_allclose(compat.first(loss), metrics["loss"], rtol=1e-2, atol=1e-9)
        print(f"epoch {epoch}  loss {metrics['loss']:.2e}")
    old = jax.device_get(compat.unreplicate(replicated))
    for name, value in state.model.items():
        np.testing.assert_allclose(old[name], value, rtol=1e-4)


if __name__ == "__main__":
    main()
