"""Arguments from anywhere: what breaks most old programs on today's JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import compat

X = np.arange(8, dtype=np.float32)

double = compat.pmap(lambda x: 2 * x, "batch")
keep = compat.pmap(lambda x: x, "batch")
scaled = compat.pmap(lambda x, s: x * s.sum(), "batch", in_axes=(0, None))


def mesh(kind, names=("other",), shape=(8,)):
    return Mesh(np.array(jax.devices()).reshape(shape), names, axis_types=(kind,) * len(names))


PLACES = {
    "numpy": lambda: X,
    "float64": lambda: X.astype(np.float64),
    "uncommitted": lambda: jnp.asarray(X),
    "one_device": lambda: jax.device_put(X, jax.devices()[3]),
    "replicated": lambda: jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P())),
    "another_name": lambda: jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P("other"))),
    "explicit": lambda: jax.device_put(X, NamedSharding(mesh(AxisType.Explicit), P("other"))),
    "two_axes": lambda: jax.device_put(
        X, NamedSharding(mesh(AxisType.Auto, ("a", "b"), (4, 2)), P("b"))
    ),
    "four_devices": lambda: jax.device_put(
        X, NamedSharding(Mesh(np.array(jax.devices()[4:]), ("c",)), P("c"))
    ),
    "permuted_result": lambda: keep(X[::-1].copy())[jnp.arange(7, -1, -1)],
    "broadcast_of_a_row": lambda: jnp.broadcast_to(keep(X)[0], (8,)) + X,
}


@pytest.mark.parametrize("place", PLACES)
def test_an_argument_may_live(place):
    out = double(PLACES[place]())
    np.testing.assert_array_equal(out, 2 * X)
    assert out.sharding.spec == P("batch")


def test_a_slice_of_a_result_is_mapped_over_fewer_devices():
    np.testing.assert_array_equal(double(keep(X)[:4]), 2 * X[:4])


def test_a_result_feeds_a_map_over_other_devices():
    other = compat.pmap(lambda x: x + 1, devices=jax.devices()[4:])
    np.testing.assert_array_equal(other(keep(X)[:4]), X[:4] + 1)


def test_a_sharded_array_reaches_every_replica_whole_through_in_axes_none():
    np.testing.assert_array_equal(scaled(X, keep(X)), 28 * X)


def test_an_active_set_mesh_does_not_disturb():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        np.testing.assert_array_equal(double(X), 2 * X)
        np.testing.assert_array_equal(double(double(X)), 4 * X)


def test_keys_split_from_a_replicas_key_can_be_mapped():
    keys = compat.pmap(lambda k: jax.random.fold_in(k, 1))(
        jax.random.split(jax.random.key(0), 8)
    )
    again = jax.random.split(keys[0], 8)
    out = compat.pmap(lambda k: jax.random.uniform(k))(again)
    np.testing.assert_array_equal(out, jax.vmap(jax.random.uniform)(again))


def test_a_python_number_stays_weakly_typed():
    f = compat.pmap(lambda x, s: x * s, in_axes=(0, None))
    assert f(X.astype(jnp.bfloat16), 3.0).dtype == jnp.bfloat16
    assert f(X.astype(jnp.bfloat16), True).dtype == jnp.bfloat16


def test_float0_arguments_pass():
    zeros = np.zeros((8,), jax.dtypes.float0)
    np.testing.assert_array_equal(compat.pmap(lambda x, z: x)(X, zeros), X)


def test_a_donated_argument_that_had_to_move_is_given_up():
    f = compat.pmap(lambda x: x + 1, donate_argnums=0)
    x, host = jax.device_put(X, jax.devices()[3]), X.copy()
    np.testing.assert_array_equal(f(x), X + 1)
    assert x.is_deleted()
    np.testing.assert_array_equal(f(host), X + 1)
    np.testing.assert_array_equal(host, X)


def test_stats_names_what_moved_and_from_where():
    f = compat.pmap(lambda params, batch: params["w"] * batch)
    compat.reset_stats()
    w = f({"w": jnp.asarray(X)}, X)
    f({"w": w}, X)
    assert compat.stats() == [
        compat.Move("<lambda>", "batch", "host", 2, 64),
        compat.Move("<lambda>", "params['w']", "1 device", 1, 32),
    ]


def test_arguments_in_place_move_nothing():
    x = keep(X)
    compat.reset_stats()
    with jax.transfer_guard("disallow"):
        double(double(x))
    assert compat.stats() == []


def test_results_of_different_maps_mix_after_local():
    four, eight = keep(X[:4]), keep(X)
    pooled = jnp.concatenate([compat.local(four), compat.local(eight)])
    np.testing.assert_array_equal(pooled, np.concatenate([X[:4], X]))


def test_what_unreplicate_returns_mixes_with_arrays_anywhere():
    row = compat.unreplicate(keep(X + 1))
    np.testing.assert_array_equal(row + jax.device_put(X, jax.devices()[0]), X + 1)
    np.testing.assert_array_equal(row + jax.device_put(X, jax.devices()[5]), X + 1)
    np.testing.assert_array_equal(row + keep(X), X + 1)


def test_an_argument_given_twice_may_be_donated():
    # XLA would end the process with a segmentation fault.
    f = compat.pmap(lambda a, b: (a + b, a - b), donate_argnums=(0, 1))
    g = compat.pmap(lambda a, b: a * b, donate_argnums=0)
    x = keep(X)
    for y in (x, f(keep(X), keep(X) * 0)[0], _on_another_mesh()):
        total, zero = f(y, y)
        np.testing.assert_array_equal(total, 2 * X)
        np.testing.assert_array_equal(zero, 0 * X)
    y = keep(X)
    np.testing.assert_array_equal(g(y, y), X * X)


def _on_another_mesh():
    return jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P("other")))


def test_a_negative_position_is_donated():
    f = compat.pmap(lambda a, b: a + b, donate_argnums=-1)
    g = compat.pmap(lambda *arrays: arrays[0] + arrays[1], donate_argnums=-1)
    for h in (f, g):
        a, b = keep(X), keep(X)
        np.testing.assert_array_equal(h(a, b), 2 * X)
        assert (a.is_deleted(), b.is_deleted()) == (False, True)
