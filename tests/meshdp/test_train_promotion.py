"""Our own part of a step mixes no types, for those who let JAX mix none."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdp
from meshdp.testing import verify

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


@pytest.mark.parametrize("precision", ["full", "f16"])
def test_a_step_runs_where_types_and_ranks_are_not_promoted(precision):
    def loss(model, batch, keys):
        y = jax.vmap(model)(batch["x"].astype(model.layers[0].weight.dtype))
        return meshdp.Mean.of(jnp.square(y).sum(-1), batch["mask"])

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step = meshdp.make_train_step(
            loss,
            optax.sgd(0.01, momentum=0.9),  # Adam's own bias correction mixes types
            mesh=meshdp.make_mesh(data=2, fsdp=2, tensor=2),
            layout=meshdp.fsdp(min_size=16),
            accumulate=2,
            clip=1.0,
            precision=precision,
        )
        state = step.init(lambda key: eqx.nn.MLP(8, 8, 16, 1, key=key), jax.random.key(0))
        batch = {"x": X, "mask": np.arange(16) > 3}
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
        if precision == "full":
            verify(step, state, batch)
