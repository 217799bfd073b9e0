"""A Flax training script in the style of 2022: a CNN with cross-replica BatchNorm."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import common_utils, train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(16, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
        x = nn.relu(x).mean((1, 2))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: dict


def batches(n):
    colors = np.random.RandomState(1).normal(size=(10, 1, 1, 8))  # one for each class
    rng = np.random.RandomState(jax.host_id())
    for _ in range(n):
        y = rng.randint(0, 10, 32)
        x = rng.normal(size=(32, 6, 6, 8)) + colors[y]
        yield common_utils.shard({"x": x.astype(np.float32), "y": y})


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["x"], True, mutable=["batch_stats"])
        loss = -(common_utils.onehot(batch["y"], 10) * nn.log_softmax(logits)).sum(-1).mean()
        return loss, new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    state = state.apply_gradients(grads=grads, batch_stats=stats)
    return state, jax.lax.pmean({"loss": loss}, "batch")


def main(steps):
    variables = CNN().init(jax.random.PRNGKey(0), jnp.ones((1, 6, 6, 8)), False)
    state = TrainState.create(apply_fn=CNN().apply, tx=optax.adam(0.05), **variables)
    state = jax_utils.replicate(state)
    history = []
    for batch in jax_utils.prefetch_to_device(batches(steps), 2):
        state, metrics = train_step(state, batch)
        history.append(metrics)
    metrics = common_utils.get_metrics(history)
    print("first", metrics["loss"][0], "last", metrics["loss"][-1])
    means = jax.tree_map(lambda x: x[0], state.batch_stats)
    print("tree", len(jax.tree_leaves(means)), "step", jax_utils.unreplicate(state).step)


if __name__ == "__main__":
    main(int(sys.argv[1]))
