"""What real programs ask of `pmap`: one body, two implementations.

What we promise is what `jax.pmap` does.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import compat


@pytest.fixture(params=[jax.pmap, compat.pmap], ids=["jax", "compat"])
def pmap(request):
    return request.param


X = np.arange(8, dtype=np.float32)


def test_each_replica_sees_its_row_without_the_mapped_dimension(pmap):
    shapes = []
    out = pmap(lambda x: (shapes.append(x.shape), 2 * x)[1])(np.ones((8, 3), np.float32))
    assert shapes == [(3,)]
    np.testing.assert_array_equal(out, np.full((8, 3), 2))


def test_the_axis_name_may_be_positional(pmap):
    np.testing.assert_array_equal(pmap(lambda x: lax.psum(x, "batch"), "batch")(X), [28.0] * 8)


def test_it_decorates_through_partial(pmap):
    @partial(pmap, axis_name="batch")
    def mean(x):
        return lax.pmean(x, axis_name="batch")

    np.testing.assert_array_equal(mean(X), [3.5] * 8)
    assert mean.__name__ == "mean"
    assert mean.__wrapped__.__name__ == "mean"


def test_an_argument_with_in_axes_none_reaches_every_replica_whole(pmap):
    scale = pmap(lambda x, s: x * s, "batch", in_axes=(0, None))
    np.testing.assert_array_equal(scale(X, 3.0), 3 * X)


def test_in_axes_may_be_a_tree_with_none_in_it(pmap):
    f = pmap(lambda t, y: t["a"] * y + t["b"].sum(), in_axes=({"a": None, "b": 1}, 0))
    out = f({"a": np.float32(2), "b": np.ones((3, 8), np.float32)}, X)
    np.testing.assert_array_equal(out, 2 * X + 3)


def test_out_axes_none_keeps_one_replicas_value(pmap):
    f = pmap(lambda x: (lax.psum(x, "i"), x), "i", out_axes=(None, 0))
    total, same = f(X)
    assert total.shape == ()
    np.testing.assert_array_equal(total, 28)
    np.testing.assert_array_equal(same, X)


def test_out_axes_puts_the_replicas_where_asked(pmap):
    f = pmap(lambda x: x * jnp.arange(3, dtype=jnp.float32), out_axes=1)
    np.testing.assert_array_equal(f(X), np.arange(3, dtype=np.float32)[:, None] * X[None])


def test_keyword_arguments_are_mapped_over_dimension_0(pmap):
    f = pmap(lambda x, *, y: x + y.sum())
    np.testing.assert_array_equal(f(X, y=np.ones((8, 2), np.float32)), X + 2)


def test_static_arguments_are_constants_even_self(pmap):
    class Trainer:
        factor = 3

        @partial(pmap, static_broadcasted_argnums=(0, 2))
        def step(self, x, name):
            return x * self.factor + len(name)

    np.testing.assert_array_equal(Trainer().step(X, "ab"), 3 * X + 2)


def test_a_donated_argument_in_place_is_gone_after_the_call(pmap):
    f = pmap(lambda x, y: x + y, donate_argnums=(0,))
    x, y = pmap(lambda x: x)(X), pmap(lambda x: x)(X)
    np.testing.assert_array_equal(f(x, y), 2 * X)
    assert x.is_deleted() and not y.is_deleted()


def test_devices_says_where(pmap):
    devices = jax.devices()[4:]
    out = pmap(lambda x: lax.psum(x, "i"), "i", devices=devices)(X[:4])
    np.testing.assert_array_equal(out, [6.0] * 4)
    assert out.sharding.device_set == set(devices)


def test_fewer_replicas_use_the_first_devices(pmap):
    out = pmap(lambda x: x)(X[:3])
    assert out.sharding.device_set == set(jax.devices()[:3])


def test_axis_size_may_be_stated(pmap):
    np.testing.assert_array_equal(pmap(lambda x: x, axis_size=8)(X), X)


def test_a_partial_with_arguments_can_be_mapped(pmap):
    np.testing.assert_array_equal(pmap(partial(lambda c, x: c * x, 2.0))(X), 2 * X)


def test_a_vmapped_function_can_be_mapped_with_collectives_over_both_axes(pmap):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    f = pmap(
        jax.vmap(lambda x: x / lax.psum(x, ("outer", "inner")), axis_name="inner"), "outer"
    )
    np.testing.assert_allclose(f(x), x / x.sum(), rtol=1e-6)


def test_psum_of_one_is_a_python_int(pmap):
    f = pmap(lambda x: x * sum(range(lax.psum(1, "i"))), "i")
    np.testing.assert_array_equal(f(X), 28 * X)


def test_psum_of_a_tree_over_axis_index_groups(pmap):
    f = pmap(
        lambda x: lax.psum({"a": x}, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), "i"
    )
    np.testing.assert_array_equal(f(X)["a"], [6.0] * 4 + [22.0] * 4)


def test_none_leaves_pass_through(pmap):
    out = pmap(lambda t: {"a": t["a"], "n": t["n"]})({"a": X, "n": None})
    assert out["n"] is None
    np.testing.assert_array_equal(out["a"], X)


def test_gradients_are_per_replica_until_they_are_averaged(pmap):
    w = np.full(8, 2, np.float32)
    grads = pmap(jax.grad(lambda w, x: w * w * x))(w, X)
    np.testing.assert_array_equal(grads, 4 * X)
    mean = pmap(lambda w, x: lax.pmean(jax.grad(lambda w: w * w * x)(w), "i"), "i")(w, X)
    np.testing.assert_array_equal(mean, [14.0] * 8)


def test_the_transpose_of_psum_is_psum_as_under_vmap(pmap):
    loss = lambda x: lax.psum(x * x, "i")
    want = jax.vmap(jax.grad(loss), axis_name="i")(X)
    np.testing.assert_array_equal(pmap(jax.grad(loss), "i")(X), want)


def test_integer_gradients_are_float0(pmap):
    f = pmap(jax.grad(lambda i: (i * 2.0).sum(), allow_int=True))
    out = f(np.arange(8))
    assert out.shape == (8,) and out.dtype == jax.dtypes.float0


def test_typed_keys_are_mapped(pmap):
    keys = jax.random.split(jax.random.key(0), 8)
    out = pmap(lambda k: jax.random.normal(k, (2,)))(keys)
    np.testing.assert_array_equal(out, jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys))


def test_lower_compiles_ahead_of_time(pmap):
    f = pmap(lambda x: lax.psum(x, "i"), "i")
    compiled = f.lower(X).compile()
    assert "all-reduce" in compiled.as_text()
    np.testing.assert_array_equal(compiled(f(X)), [224.0] * 8)


def test_results_are_spread_over_the_devices_one_row_each(pmap):
    out = pmap(lambda x: x)(np.ones((8, 5), np.float32))
    assert [s.data.shape for s in out.addressable_shards] == [(1, 5)] * 8
    assert out.sharding.device_set == set(jax.devices())


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather_tiled": lambda x: lax.all_gather(x, "i", axis=0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", [(j, (j + 1) % 8) for j in range(8)]),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "pswapaxes": lambda x: lax.pswapaxes(x, "i", 0),
    "axis_index": lambda x: x + lax.axis_index("i"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_agree_with_vmap(pmap, name):
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    want = jax.vmap(COLLECTIVES[name], axis_name="i")(x)
    np.testing.assert_allclose(pmap(COLLECTIVES[name], "i")(x), want, rtol=1e-6)
