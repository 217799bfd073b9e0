"""More replicas than devices: the numbers are those of one device for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import compat

ONE = jax.devices()[:1]


def collectives(n):
    return {
        "psum": lambda x: lax.psum(x, "i"),
        "pmean": lambda x: lax.pmean(x, "i"),
        "pmax": lambda x: lax.pmax(x, "i"),
        "pmin": lambda x: lax.pmin(x, "i"),
        "all_gather": lambda x: lax.all_gather(x, "i"),
        "ppermute": lambda x: lax.ppermute(x, "i", [(j, (j + 1) % n) for j in range(n)]),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
        "axis_index": lambda x: x + lax.axis_index("i"),
    }


def oracle(name, x):
    """What each collective means, on the host."""
    n = len(x)
    return {
        "psum": lambda: np.broadcast_to(x.sum(0), x.shape),
        "pmean": lambda: np.broadcast_to(x.mean(0), x.shape),
        "pmax": lambda: np.broadcast_to(x.max(0), x.shape),
        "pmin": lambda: np.broadcast_to(x.min(0), x.shape),
        "all_gather": lambda: np.broadcast_to(x[None], (n, *x.shape)),
        "ppermute": lambda: np.roll(x, 1, axis=0),
        "all_to_all": lambda: x.T,
        "psum_scatter": lambda: x.sum(0),
        "axis_index": lambda: x + np.arange(n, dtype=np.float32)[:, None],
    }[name]()


@pytest.mark.parametrize("name", collectives(8))
def test_eight_replicas_on_one_device_give_the_numbers_of_eight_devices(name):
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    out = compat.pmap(collectives(8)[name], "i", devices=ONE)(x)
    assert out.sharding.device_set == set(ONE)
    np.testing.assert_allclose(out, oracle(name, x), rtol=1e-5)


@pytest.mark.parametrize("name", ["psum", "ppermute", "all_to_all", "axis_index"])
def test_sixteen_replicas_are_spread_over_eight_devices(name):
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    out = compat.pmap(collectives(16)[name], "i")(x)
    assert {s.data.shape for s in out.addressable_shards} == {(2, 16)}
    np.testing.assert_allclose(out, oracle(name, x), rtol=1e-5)


@pytest.mark.parametrize(("replicas", "devices"), [(12, 6), (11, 1), (9, 3)])
def test_a_number_that_does_not_divide_is_correct_on_fewer_devices(replicas, devices):
    x = np.arange(replicas, dtype=np.float32)
    out = compat.pmap(lambda x: x + lax.psum(x, "i"), "i")(x)
    assert len(out.sharding.device_set) == devices
    np.testing.assert_array_equal(out, x + x.sum())


def test_a_training_step_for_eight_replicas_runs_on_one_device():
    def step(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "i"), lax.pmean(loss, "i")

    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4, 3)).astype(np.float32)
    y = rng.standard_normal((8, 4)).astype(np.float32)
    w = np.ones((8, 3), np.float32)
    many = compat.pmap(step, "i")(w, x, y)
    one = compat.pmap(step, "i", devices=ONE)(w, x, y)
    for a, b in zip(many, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_out_axes_and_in_axes_mean_the_same():
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    f = lambda x: (x, lax.psum(x, "i"), x)
    a, b, c = compat.pmap(f, "i", in_axes=-1, out_axes=(-1, None, 0))(x)
    np.testing.assert_array_equal(a, x)
    np.testing.assert_array_equal(b, x.sum(1))
    np.testing.assert_array_equal(c, x.T)


def test_donation_and_static_arguments_work():
    f = compat.pmap(
        lambda x, k: x * k, "i", donate_argnums=0, static_broadcasted_argnums=1, devices=ONE
    )
    x = f(np.arange(4, dtype=np.float32), 2)
    y = f(x, 3)
    assert x.is_deleted()
    np.testing.assert_array_equal(y, [0, 6, 12, 18])


def test_axis_index_groups_say_why_they_cannot():
    f = compat.pmap(
        lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]), "i", devices=ONE
    )
    with pytest.raises(NotImplementedError) as e:
        f(np.ones(4, np.float32))
    assert str(e.value) == (
        "axis_index_groups need one device for each replica, but here 4 replicas share 1 "
        "devices (or are vectorised). Map over at most 1 replicas, or map twice: pmap over the "
        "groups' axis and over the axis within each group."
    )


def test_an_axis_name_may_be_any_object():
    axis = object()
    out = compat.pmap(lambda x: lax.psum(x, axis), axis)(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(out, [6.0] * 4)


def test_an_axis_name_may_be_empty():
    out = compat.pmap(lambda x: lax.psum(x, ""), "")(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(out, [6.0] * 4)
