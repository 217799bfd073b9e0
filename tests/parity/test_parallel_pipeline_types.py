"""Pipelines in bfloat16, and of layers that multiply weights by constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import pipeline, pipeline_loss

KEYS = jax.random.split(jax.random.key(0), 2)
STAGES = meshdp.by_path({"": P("stage")})


@pytest.mark.parametrize("sizes", [dict(stage=2), dict(data=2, stage=2, tensor=2)], ids=str)
def test_bfloat16_goes_through_a_pipeline_and_back(sizes):
    """XLA for CPU ended the process."""
    w = (jax.random.normal(KEYS[0], (4, 8, 8)) / 3).astype(jnp.bfloat16)
    x = jax.random.normal(KEYS[1], (16, 8)).astype(jnp.bfloat16)

    def total(w, x, through):
        return through(w, x).astype(jnp.float32).sum()

    def one_after_the_other(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return x

    def staged(w, x):
        return pipeline(lambda w, x, _: jnp.tanh(x @ w), w, x, microbatches=2)

    devices = jax.devices()[: int(np.prod(list(sizes.values())))]

    @meshdp.distributed(
        mesh=meshdp.make_mesh(**sizes, devices=devices), layout=STAGES, donate=False
    )
    def step(w, x):
        return w, jax.value_and_grad(total, (0, 1))(w, x, staged)

    _, (value, grads) = step(w, x)
    want_value, want = jax.value_and_grad(total, (0, 1))(w, x, one_after_the_other)
    np.testing.assert_allclose(value, want_value, rtol=2**-6)
    for have, leaf in zip(grads, want, strict=True):
        assert have.dtype == jnp.bfloat16
        have, leaf = np.asarray(have, np.float32), np.asarray(leaf, np.float32)
        # Four layers of two roundings each.
        np.testing.assert_allclose(have, leaf, rtol=0, atol=2**-5 * np.abs(leaf).max())


@pytest.mark.parametrize("zero_bubble", [False, True])
def test_a_layer_may_multiply_its_weights_by_constants(zero_bubble):
    def layer(w, x, _):
        return x + jnp.tanh(x @ (w["w"] * 0.3)) / (w["s"] + 1e-3)[None] + w["s"][None] * 0.1

    def loss(w, batch, keys):
        return pipeline_loss(
            lambda p, batch: batch["x"],
            layer,
            lambda p, x, batch: meshdp.Mean.of(x.sum(-1)),
            ((), w, ()),
            batch,
            microbatches=2,
            remat=not zero_bubble,
            zero_bubble=zero_bubble,
        )

    make = lambda key: {"w": jax.random.normal(key, (4, 8, 8)), "s": jnp.ones((4, 8))}
    step = meshdp.make_train_step(
        loss, optax.sgd(0.1), mesh=meshdp.make_mesh(data=4, stage=2), layout=STAGES
    )
    x = jax.random.normal(KEYS[1], (16, 8))
    grads, _ = step.gradients(step.init(make, KEYS[0]), {"x": x})

    def plain(w):
        y = x
        for i in range(4):
            y = layer(jax.tree.map(lambda w, i=i: w[i], w), y, None)
        return y.sum(-1).mean()

    want = jax.grad(plain)(make(KEYS[0]))
    for name in want:
        atol = 1e-5 * np.abs(want[name]).max()
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-5, atol=atol)
