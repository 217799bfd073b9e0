"""Document A, 2.2: an image model in the article's five steps, in both styles.

Runs in about ten seconds on eight forced CPU devices; the loss falls to a tenth.

The article names ResNet-50 and prints no code. This is a residual network for a laptop, in the
same steps: define the model, map it, place the data, call, average.
"""

import jax
import numpy as np
import optax

import compat
import meshdp
from meshdp.testing import force_devices

force_devices(8)

steps, rows, classes, width, blocks = 30, 32, 4, 8, 2  # rows: per step, over all devices
optimizer = optax.adam(1e-2)


# 1. The model: plain JAX, nothing about devices.
def init(key):
    keys = jax.random.split(key, blocks + 2)
    normal = lambda key, *shape: 0.2 * jax.random.normal(key, shape)
    blocks_ = [normal(k, 3, 3, width, width) for k in keys[2:]]
    stem, head = normal(keys[0], 3, 3, 3, width), normal(keys[1], width, classes)
    return {"stem": stem, "blocks": blocks_, "head": head}


def conv(x, w):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)


def losses(params, batch):  # of each example
    x = conv(batch["x"], params["stem"])
    for w in params["blocks"]:
        x = x + conv(jax.nn.relu(x), w)
    logits = x.mean((1, 2)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


# 2. Style 1: the step is mapped over the devices...
def step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda p: losses(p, batch).mean())(params)
    loss, grads = compat.pmean((loss, grads), "device")  # 5. ...and averages what they found
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def main():
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, rows)
    x = rng.normal(size=(classes, 1, 1, 3))[y] + 0.1 * rng.normal(size=(rows, 8, 8, 3))
    batch = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    params = init(jax.random.key(0))
    mapped = compat.pmap(step, "device", donate_argnums=0)
    old = compat.replicate((params, optimizer.init(params)))  # 3. placed

    # Style 2: one call; and the very same step on a mesh.
    mesh_step = meshdp.make_train_step(lambda p, b, k: meshdp.Mean.of(losses(p, b)), optimizer)
    new = mesh_step.init(init, jax.random.key(0))
    view = compat.global_view(step, "device", donate_argnums=0)
    seen = (init(jax.random.key(0)), optimizer.init(params))
    for i in range(steps):
        old, loss = mapped(old, compat.shard(batch))  # 4. called
        new, metrics = mesh_step(new, batch)
        seen, view_loss = view(seen, batch)
        both = [compat.first(loss), view_loss]
        np.testing.assert_allclose(both, [metrics["loss"]] * 2, rtol=2e-2, atol=1e-4)
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:2d}  loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
