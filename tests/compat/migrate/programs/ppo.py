"""Actors on some devices and a learner on the others, in the style of Podracer PPO."""

import jax
import jax.numpy as jnp
import numpy as np

DEVICES = jax.local_devices()
LEARNERS, ACTORS = DEVICES[:4], DEVICES[4:]


def act(params, obs):
    return jnp.tanh(obs @ params["pi"])


def learn(params, obs, actions, advantages):
    def loss_fn(params):
        ratio = jnp.sum(actions * act(params, obs), axis=-1)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))

    grads = jax.lax.pmean(jax.grad(loss_fn)(params), "learners")
    return jax.tree_map(lambda p, g: p - 0.3 * g, params, grads)


p_act = jax.pmap(act, devices=ACTORS)
p_learn = jax.pmap(learn, axis_name="learners", devices=LEARNERS)


def main():
    data = np.random.default_rng(2)
    params = {"pi": jnp.eye(3)}
    learner_params = jax.device_put_replicated(params, LEARNERS)
    for _ in range(3):
        # The newest weights go from the learner to the actors.
        newest = jax.tree_map(lambda x: x[0], learner_params)
        actor_params = jax.device_put_replicated(newest, ACTORS)
        obs = data.normal(size=(4, 6, 3)).astype(np.float32)
        actions = p_act(actor_params, obs)
        rollout = jax.device_get(actions)
        shards = [
            jax.device_put_sharded(list(x), LEARNERS)
            for x in (obs, rollout, data.normal(size=(4, 6)).astype(np.float32))
        ]
        learner_params = p_learn(learner_params, *shards)
    final = jax.tree_map(lambda x: x[0], learner_params)
    return {"pi": final["pi"], "devices": len(LEARNERS) + len(ACTORS)}
