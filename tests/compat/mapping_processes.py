"""What each process does in test_processes.py: prints one JSON object at the end.

Each function of `CASES` runs on both processes, in order; the tests judge what it returns.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat

ME = jax.process_index()
X = np.arange(4, dtype=np.float32) + 4 * ME
CASES = []

total = compat.pmap(lambda x: (x, lax.psum(x, "i"), lax.axis_index("i")), "i")


def case(f):
    CASES.append(f)
    return f


@case
def local_in_local_out_collectives_over_all():
    return total(X)


@case
def as_jax_pmap_does():
    return jax.pmap(lambda x: (x, lax.psum(x, "i"), lax.axis_index("i")), "i")(X)


@case
def a_result_in_place_moves_nothing():
    x = total(X)[0]
    compat.reset_stats()
    total(total(x)[0])
    return {"moves": len(compat.stats()), "local": x.is_fully_addressable}


@case
def one_row_is_read():
    y = total(X)[0]
    return [compat.unreplicate(y), y[0], compat.local(y)]


@case
def what_was_compiled_ahead_converts_as_the_call_does():
    compiled = total.lower(X).compile()
    return [compiled(X)[1], compiled(total(X)[0])[1]]


@case
def more_replicas_than_devices():
    return total(np.concatenate([X, X]))[1:]


@case
def devices_of_both_processes_in_any_order():
    own = [jax.local_devices(process_index=p) for p in range(2)]
    f = lambda devices: compat.pmap(lambda x: lax.all_gather(x, "i"), "i", devices=devices)
    grouped = f([*own[0][:2], *own[1][:2]])
    mixed = f([own[1][1], own[0][1], own[1][0], own[0][0]])
    return [grouped(X[:2])[0], mixed(X[:2])[0]]


@case
def arguments_and_results_that_are_not_mapped():
    f = lambda w, x: (w * lax.pmean(x, "i"), x)
    return compat.pmap(f, "i", in_axes=(None, 0), out_axes=(None, 0))(np.float32(2), X)


@case
def keys_and_negative_axes():
    keys = compat.pmap(lambda k: k, "i")(jax.random.split(jax.random.key(ME), 4))
    x = np.stack([X, X])
    return [jax.random.key_data(keys), compat.pmap(lambda x: x, in_axes=-1, out_axes=-1)(x)]


@case
def the_donated_argument_is_gone():
    f = compat.pmap(lambda x: lax.psum(x, "i"), "i", donate_argnums=0)
    x = f(X)
    return [f(x), x.is_deleted()]


@case
def an_array_over_all_processes_is_mapped_by_its_own_rows():
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,))
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("b")), X)
    return total(x)


@case
def axis_size_counts_the_replicas_of_all_processes():
    f = compat.pmap(lambda x: x + lax.axis_index("i"), "i", in_axes=None, axis_size=8)
    return f(np.float32(0))


@case
def grad_and_nested_maps():
    inner = lambda x: compat.pmap(lambda y: lax.psum(y, ("i", "j")), "j")(x)
    grad = jax.grad(lambda x: compat.pmap(lambda x: x * x)(x).sum())
    return [compat.pmap(inner, "i")(np.ones((4, 2), np.float32))[0], grad(jnp.asarray(X))]


@case
def a_training_loop():
    """Linear regression in the style of the tutorials, on rows that each process has."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4, 3)).astype(np.float32)
    y = x @ np.float32([1, -2, 3])
    own = slice(4 * ME, 4 * ME + 4)

    def step(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "batch"), lax.pmean(loss, "batch")

    step = compat.pmap(step, "batch", donate_argnums=0)
    w = compat.replicate(np.zeros(3, np.float32))
    for _ in range(5):
        w, loss = step(w, x[own], y[own])
    return [compat.unreplicate(w), compat.unreplicate(loss)]


def main():
    out = {f.__name__: jax.tree.map(lambda x: np.asarray(x).tolist(), f()) for f in CASES}
    print(json.dumps(out))


main()
