"""Several steps in one call, in the style of Score SDE: pmap(partial(scan, step_fn))."""

import functools

import flax.jax_utils as flax_utils
import jax
import jax.numpy as jnp
import numpy as np

N_JITTED_STEPS = 2


def step_fn(carry_state, batch):
    (rng, state) = carry_state
    rng, step_rng = jax.random.split(rng)
    t = jax.random.uniform(step_rng, (batch.shape[0],))

    def loss_fn(params):
        score = batch @ params
        return jnp.mean(jnp.square(score + t[:, None] * batch))

    loss, grad = jax.value_and_grad(loss_fn)(state["params"])
    grad = jax.lax.pmean(grad, axis_name="batch")
    new_state = {"params": state["params"] - 0.1 * grad, "step": state["step"] + 1}
    loss = jax.lax.pmean(loss, axis_name="batch")
    return (rng, new_state), loss


def main():
    data = np.random.default_rng(4)
    state = {"params": jnp.zeros((3, 3)), "step": jnp.array(0)}
    pstate = flax_utils.replicate(state)
    rng = jax.random.PRNGKey(42)
    p_train_step = jax.pmap(functools.partial(jax.lax.scan, step_fn), axis_name="batch")
    losses = []
    for _ in range(2):
        batch = data.normal(size=(8, N_JITTED_STEPS, 4, 3)).astype(np.float32)
        batch = jax.tree_map(lambda x: jnp.asarray(x), batch)
        rng, *next_rng = jax.random.split(rng, num=jax.local_device_count() + 1)
        next_rng = jnp.asarray(next_rng)
        (_, pstate), ploss = p_train_step((next_rng, pstate), batch)
        losses.append(flax_utils.unreplicate(ploss).mean())
    saved = flax_utils.unreplicate(pstate)
    return {"losses": losses, "params": saved["params"], "step": saved["step"]}
