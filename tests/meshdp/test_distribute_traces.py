"""`distributed` compiles anew for what it must, and for nothing else; and moves nothing."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp._place import place, shard_batch

X = np.ones((16, 4), np.float32)


@pytest.fixture
def counted():
    """A step that counts how often Python runs it."""
    seen = SimpleNamespace(traces=0)

    def body(state, batch, *args):
        seen.traces += 1
        return {**state, "w": state["w"] + batch["x"].mean()}, None

    seen.step = meshdp.distributed(body, mesh=meshdp.make_mesh(data=8))
    return seen


class Config(eqx.Module):
    name: str = eqx.field(static=True)
    rate: float
    training: bool


def keep(x):
    return x


SAME = {
    "nothing": [{}, {}],
    "a_numpy_state": [{"w": np.zeros(4, np.float32)}, {"w": jnp.zeros(4)}],
    "a_weakly_typed_leaf": [{"w": jnp.zeros(4)}, {"w": jnp.full(4, 0.0)}],
    "static_leaves_that_are_equal": [
        {"f": keep, "mode": "train", "flag": True, "none": None, "at": (1, "a")},
        {"f": keep, "mode": "tra" + "in"[:2], "flag": True, "none": None, "at": (1, "a")},
    ],
    "modules_that_are_equal": [
        {"config": Config("a", 0.1, True)},
        {"config": Config("a", 0.1, True)},
    ],
    "a_number": [{"n": 3}, {"n": 4}],
    "a_number_and_an_array": [{"n": 3}, {"n": jnp.int32(4)}],
}


@pytest.mark.parametrize("case", SAME)
def test_a_state_that_is_the_same_in_kind_is_not_traced_again(case, counted):
    for more in SAME[case]:
        state, _ = counted.step({"w": jnp.zeros(4), **more}, {"x": X})
        counted.step(state, {"x": X})
    assert counted.traces == 1


def test_a_state_made_with_weak_types_is_traced_once(counted):
    state = counted.step.init(lambda: {"w": jnp.full(4, 0.0)})
    for _ in range(2):
        state, _ = counted.step(state, {"x": X})
    assert counted.traces == 1


OTHER = {
    "a_function": ({"f": keep}, {"f": jnp.tanh}),
    "a_string": ({"mode": "train"}, {"mode": "eval"}),
    "a_flag": ({"flag": True}, {"flag": False}),
    "a_flag_that_equals_a_number": ({"flag": True}, {"flag": 1}),
    "a_number_in_a_module": ({"c": Config("a", 1.0, True)}, {"c": Config("a", 2.0, True)}),
    "an_integer_that_becomes_a_float": ({"n": 3}, {"n": 3.0}),
    "a_static_field": ({"c": Config("a", 1.0, True)}, {"c": Config("b", 1.0, True)}),
    "a_flag_in_a_module": ({"c": Config("a", 1.0, True)}, {"c": Config("a", 1.0, False)}),
    "a_shape": ({"a": np.zeros(3)}, {"a": np.zeros(4)}),
    "a_dtype": ({"a": np.zeros(3, np.float32)}, {"a": np.zeros(3, np.int32)}),
    "a_leaf_more": ({}, {"a": np.zeros(3)}),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_change_in_kind_is_traced_once_and_remembered(case, counted):
    for more in OTHER[case] * 2:
        counted.step({"w": jnp.zeros(4), **more}, {"x": X})
    assert counted.traces == 2


def test_numbers_and_arrays_of_other_values_are_not_traced_again(counted):
    w = np.zeros(4, np.float32)
    for rate, count in [(0.1, 1), (0.2, 2), (0.0, -7)]:
        batch = {"x": X * rate, "scale": rate, "n": count}
        counted.step({"w": w}, batch, rate, count, np.float32(rate), jax.random.key(count))
    assert counted.traces == 1


def test_static_arguments_are_traced_once_each(counted):
    for mode in ("train", "eval", "train"):
        for flag in (True, False):
            counted.step({"w": np.zeros(4)}, {"x": X, "flag": flag}, mode, keep)
    assert counted.traces == 4


def test_a_static_leaf_of_the_new_state_may_change(counted):
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(state, batch):
        counted.traces += 1
        return {"w": state["w"] + 1, "mode": "late"}, state["mode"]

    state, first = step({"w": jnp.zeros(4), "mode": "early"}, X)
    for _ in range(2):
        state, later = step(state, X)
    assert (first, later, counted.traces) == ("early", "late", 2)
    np.testing.assert_array_equal(state["w"], 3 * np.ones(4))


def test_a_number_put_where_an_array_was_becomes_an_array_of_its_dtype(counted):
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(state, batch):
        counted.traces += 1
        return {"count": 0, "half": 0.5, "on": True}, state["count"]

    state = {"count": jnp.uint8(7), "half": jnp.bfloat16(1), "on": jnp.asarray(False)}
    for _ in range(3):
        state, last = step(state, X)
    assert [x.dtype for x in state.values()] == [jnp.uint8, jnp.bfloat16, bool]
    assert (int(last), float(state["half"]), bool(state["on"])) == (0, 0.5, True)
    assert counted.traces == 1


def test_a_second_call_with_placed_arguments_moves_nothing():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=2, fsdp=4))
    def step(w, batch, key, rate):
        return w + rate * batch["x"].mean(), jax.random.normal(key)

    w, _ = step(np.zeros(4, np.float32), {"x": X}, jax.random.key(0), 0.1)
    batch = shard_batch({"x": X}, step.mesh)
    key, rate = place((jax.random.key(0), np.float32(1)), NamedSharding(step.mesh, P()))
    step(w, batch, key, rate)  # the other dtype of `rate` is compiled for here
    w, _ = step(np.zeros(4, np.float32), {"x": X}, key, rate)
    with jax.transfer_guard("disallow"):
        w, _ = step(w, batch, key, rate)
        w, _ = step(w, batch, key, 0.1)  # a number is sent, and said to be
    np.testing.assert_allclose(w, 2.1 * np.ones(4), rtol=1e-6)
