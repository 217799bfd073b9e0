"""Maps within maps, and `pmap` under and over the other transformations.

The oracle is `jax.vmap` with the same axis names.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import compat

X = np.arange(8, dtype=np.float32)
XY = np.arange(8, dtype=np.float32).reshape(4, 2)


def both(x):
    return x + lax.psum(x, "inner") + 10 * lax.psum(x, ("outer", "inner"))


def inner(x):
    return compat.pmap(both, "inner")(x)


def oracle(x):
    return jax.vmap(jax.vmap(both, axis_name="inner"), axis_name="outer")(x)


nested = compat.pmap(inner, "outer")


def test_a_map_within_a_map_gets_a_mesh_axis_of_its_own():
    out = nested(XY)
    assert {s.data.shape for s in out.addressable_shards} == {(1, 1)}
    np.testing.assert_array_equal(out, oracle(XY))
    np.testing.assert_array_equal(nested(out), oracle(oracle(XY)))


@pytest.mark.parametrize("shape", [(8, 2), (2, 3, 2), (16, 2)], ids=str)
def test_maps_within_maps_are_vectorised_when_the_devices_do_not_suffice(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(nested(x), oracle(x))


def test_three_maps_take_three_axes():
    three = lambda wrap: wrap(
        wrap(wrap(lambda x: x + lax.psum(x, ("a", "b", "c")), "c"), "b"), "a"
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    out = three(compat.pmap)(x)
    assert len(out.sharding.device_set) == 8
    assert out.addressable_shards[0].data.shape == (1, 1, 1)
    np.testing.assert_array_equal(out, three(lambda f, n: jax.vmap(f, axis_name=n))(x))


def test_two_different_maps_side_by_side_within_one():
    f = lambda wrap: (
        lambda x: (
            wrap(both, "inner")(x)
            + wrap(lambda y: lax.psum(y.sum(), "other"), "other")(x.reshape(1, 2)).sum()
        )
    )
    want = jax.vmap(f(lambda g, n: jax.vmap(g, axis_name=n)), axis_name="outer")(XY)
    np.testing.assert_array_equal(compat.pmap(f(compat.pmap), "outer")(XY), want)


def test_gradients_go_through_maps_within_maps():
    loss = lambda f: lambda x: (f(x) ** 2).sum()
    np.testing.assert_array_equal(jax.grad(loss(nested))(XY), jax.grad(loss(oracle))(XY))


def total(x):
    return x * lax.psum(x, "i")


mapped = compat.pmap(total, "i")
vmapped = jax.vmap(total, axis_name="i")

AROUND = {
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
    "value_and_grad": lambda f: lambda x: jax.value_and_grad(lambda x: f(x).sum())(x)[1],
    "jit": jax.jit,
    "jit_of_grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x, 3 * x])),
    "vmap_of_grad": lambda f: (
        lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([x, 2 * x, 3 * x]))
    ),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c) / 100, c), x, None, length=3)[1],
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (2 * x,))[1],
}


@pytest.mark.parametrize("name", AROUND)
def test_pmap_works_under(name):
    x = jnp.asarray(X)
    np.testing.assert_allclose(AROUND[name](mapped)(x), AROUND[name](vmapped)(x), rtol=1e-5)


# Under `jit` and `scan` only JAX places arguments, and it refuses those committed elsewhere.
MOVING = ["grad", "value_and_grad", "vmap", "vmap_of_grad", "remat", "jvp"]


@pytest.mark.parametrize("name", MOVING)
def test_arguments_of_another_device_are_moved_under(name):
    want = AROUND[name](vmapped)(jnp.asarray(X))
    np.testing.assert_allclose(AROUND[name](mapped)(_third()), want, rtol=1e-5)


def _third():
    return jax.device_put(X, jax.devices()[2])


INSIDE = {
    "jit": lambda x: jax.jit(total)(x),
    "grad": jax.grad(total),
    "vmap": lambda x: jax.vmap(lambda s: total(s * x))(jnp.arange(3.0)),
    "scan": lambda x: lax.scan(lambda c, _: (total(c) / 9, None), x, None, length=2)[0],
    "remat": jax.grad(jax.checkpoint(total)),
    "cond": lambda x: lax.cond(x > 3, total, lambda x: -total(x), x),
}


@pytest.mark.parametrize("name", INSIDE)
def test_pmap_works_over(name):
    want = jax.vmap(INSIDE[name], axis_name="i")(X)
    np.testing.assert_allclose(compat.pmap(INSIDE[name], "i")(X), want, rtol=1e-5)


def test_gradients_come_back_to_where_their_argument_was():
    x = _third()
    assert jax.grad(lambda x: mapped(x).sum())(x).devices() == {jax.devices()[2]}


def test_vectorised_replicas_compose_too():
    x = jnp.arange(16, dtype=jnp.float32)
    for around in (AROUND["grad"], AROUND["jit"], AROUND["vmap"]):
        np.testing.assert_allclose(around(mapped)(x), around(vmapped)(x), rtol=1e-5)


def test_pmap_works_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("other",), axis_types=(AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    f = jax.shard_map(
        mapped, mesh=mesh, in_specs=P("other"), out_specs=P("other"), check_vma=False
    )
    want = np.concatenate([vmapped(X[:4]), vmapped(X[4:])])
    np.testing.assert_array_equal(f(X), want)


def test_pmap_under_jit_with_a_mesh_set_is_correct():
    mesh = Mesh(np.array(jax.devices()), ("other",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("other")))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(mapped)(x), vmapped(X))
