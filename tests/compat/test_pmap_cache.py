"""What compiles again, and what does not: traces are counted."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def counted():
    """A function of a constant and an array that counts how often it is traced."""

    def f(c, x):
        f.traces += 1
        return c * x

    f.traces = 0
    return f


def test_an_immediate_pmap_in_a_loop_compiles_once(counted):
    f = functools.partial(counted, 2.0)
    for _ in range(3):
        np.testing.assert_array_equal(compat.pmap(f, "i")(X), 2 * X)
    assert counted.traces == 1


def test_a_new_partial_of_the_same_function_does_not_compile_again(counted):
    array = np.float32([2])
    for _ in range(3):
        compat.pmap(functools.partial(counted, 2.0))(X)
        compat.pmap(functools.partial(counted, array))(X)
        compat.pmap(functools.partial(counted, {"a": [jnp.float32(2)]}["a"][0]))(X)
    # 2.0, the NumPy array (by value), and three JAX arrays (by identity).
    assert counted.traces == 5


def test_another_constant_compiles_again_with_the_right_value(counted):
    for c, kind in [(1, "int32"), (True, "int32"), (1.0, "float32"), (1, "int32")]:
        out = compat.pmap(functools.partial(counted, c))(np.arange(8, dtype=np.int32))
        assert out.dtype == kind
    assert counted.traces == 3


def test_an_array_changed_in_place_is_seen(counted):
    c = np.full((), 3, np.float32)
    compat.pmap(functools.partial(counted, c))(X)
    c[()] = 4
    np.testing.assert_array_equal(compat.pmap(functools.partial(counted, c))(X), 4 * X)


def test_only_shapes_static_values_and_devices_compile_again(counted):
    f = compat.pmap(counted, static_broadcasted_argnums=0)
    for _ in range(2):
        f(2, X)
        f(2, f(2, X))
        f(2, jnp.asarray(X))
    assert counted.traces == 1
    f(3, X)
    assert counted.traces == 2
    f(3, np.ones((8, 2), np.float32))
    assert counted.traces == 3
    f(3, X[:4])
    assert counted.traces == 4
    compat.pmap(counted, static_broadcasted_argnums=0, devices=jax.devices()[4:])(3, X[:4])
    assert counted.traces == 5
    f(2, X)
    f(3, X[:4])
    assert counted.traces == 5


def test_results_in_place_with_more_rows_are_mapped_by_their_new_number():
    f = compat.pmap(lambda x: x + jax.lax.psum(1, "i"), "i")
    eight = f(X)
    sixteen = jax.device_put(np.zeros(16, np.float32), eight.sharding)
    f(eight)
    np.testing.assert_array_equal(f(sixteen), [16.0] * 16)
    np.testing.assert_array_equal(f(eight), np.asarray(eight) + 8)


def test_lambdas_are_never_taken_for_one_another():
    out = [compat.pmap(lambda x: x * k)(X)[1].item() for k in (1, 2, 3)]  # noqa: B023
    assert out == [1, 2, 3]


def test_bound_methods_of_one_object_compile_once():
    class Trainer:
        traces = 0

        def step(self, x):
            self.traces += 1
            return x

    a, b = Trainer(), Trainer()
    for _ in range(2):
        compat.pmap(a.step)(X)
        compat.pmap(b.step)(X)
    assert (a.traces, b.traces) == (1, 1)


def test_what_was_compiled_dies_with_its_function():
    big = jnp.ones(8)

    def f(x):
        return x + big.sum()

    compat.pmap(f)(X)
    ref = weakref.ref(f)
    del f
    gc.collect()
    assert ref() is None


def test_a_call_on_arguments_in_place_goes_straight_to_the_compiled_program(monkeypatch):
    f = compat.pmap(lambda state: {"w": state["w"] + 1})
    state = f(f({"w": X}))

    def careful(*args):
        raise AssertionError("the slow path was taken")

    monkeypatch.setattr("compat._axes.mapped_size", careful)
    np.testing.assert_array_equal(f(state)["w"], X + 3)
    with pytest.raises(AssertionError, match="the slow path was taken"):
        f({"w": X})


def test_a_call_by_keyword_goes_straight_to_the_compiled_program(monkeypatch):
    f = compat.pmap(lambda x, y: x + y)
    x = f(X, y=X)
    f(x, y=x)
    monkeypatch.setattr("compat._axes.mapped_size", None)
    np.testing.assert_array_equal(f(x, y=x), 4 * X)


def test_a_keyword_that_is_none_is_not_taken_for_none_given():
    f = compat.pmap(lambda x, y=3: x if y is None else x + y)
    x = f(X, y=None)
    np.testing.assert_array_equal(f(x, y=None), X)
    np.testing.assert_array_equal(f(x), X + 3)
    np.testing.assert_array_equal(f(x, y=None), X)


def test_zero_and_minus_zero_are_different_constants():
    f = lambda c, x: x / c
    signs = [compat.pmap(functools.partial(f, c))(X + 1)[0] for c in (0.0, -0.0)]
    assert signs == [np.inf, -np.inf]


def test_an_immediate_pmap_can_be_lowered():
    # Nothing but `lower` holds the function any more.
    np.testing.assert_array_equal(compat.pmap(lambda x: 2 * x).lower(X).compile()(X), 2 * X)
