"""Data-parallel training steps in raw JAX, as a good engineer writes them.

Each function takes `loss(params, batch, keys) -> mean`, with one key per example, an optax
optimizer, the parameters and the batch on the host, and returns `(step, state, batch)` with
`step(state, batch) -> (state, loss)`, the state donated. They use none of our code.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def _mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def _keys(state, first, count):
    key = jax.random.fold_in(state["key"], state["step"])
    return jax.vmap(partial(jax.random.fold_in, key))(first + jnp.arange(count))


def _start(optimizer, params):
    params = jax.tree.map(np.asarray, params)
    step, key = np.int32(0), jax.random.key(0)
    return {"params": params, "opt": optimizer.init(params), "step": step, "key": key}


def _updated(optimizer, state, grads):
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "step": state["step"] + 1}


def _mean_over_devices(loss, optimizer, state, batch):
    """One device's part of a step, inside `pmap` or `shard_map`."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    keys = _keys(state, jax.lax.axis_index("data") * rows, rows)
    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(state["params"], batch, keys), "data")
    return _updated(optimizer, state, grads), value


def pmap(loss, optimizer, params, batch):
    """`jax.pmap`, with the state on every device."""
    n = jax.device_count()
    sharding = NamedSharding(_mesh(), P("data"))
    every = lambda x: jax.device_put(jnp.broadcast_to(x, (n, *jnp.shape(x))), sharding)
    split = lambda x: jax.device_put(x.reshape(n, -1, *x.shape[1:]), sharding)
    step = jax.pmap(
        partial(_mean_over_devices, loss, optimizer), axis_name="data", donate_argnums=0
    )
    return step, jax.tree.map(every, _start(optimizer, params)), jax.tree.map(split, batch)


def automatic(loss, optimizer, params, batch):
    """`jax.jit` with shardings: the compiler partitions it."""
    everywhere, split = NamedSharding(_mesh(), P()), NamedSharding(_mesh(), P("data"))

    def step(state, batch):
        keys = _keys(state, 0, jax.tree.leaves(batch)[0].shape[0])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, keys)
        return _updated(optimizer, state, grads), value

    step = jax.jit(
        step,
        in_shardings=(everywhere, split),
        out_shardings=(everywhere, everywhere),
        donate_argnums=0,
    )
    state = jax.device_put(_start(optimizer, params), everywhere)
    return step, state, jax.device_put(batch, split)


def shard_map(loss, optimizer, params, batch):
    """`jit(shard_map)`: every device takes the mean and updates the whole."""
    mesh = _mesh()
    step = jax.shard_map(
        partial(_mean_over_devices, loss, optimizer),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P()),
        check_vma=False,
    )
    state = jax.device_put(_start(optimizer, params), NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return jax.jit(step, donate_argnums=0), state, batch


FORMS = {"jax.pmap": pmap, "jit, automatic": automatic, "jit(shard_map)": shard_map}
