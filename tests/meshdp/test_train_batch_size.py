"""The batch that fits is found by compiling."""

import jax
import jax.numpy as jnp
import optax
import pytest

import meshdp


def deep(params, batch, keys):
    x = batch["x"]
    for _ in range(4):
        x = jnp.tanh(x @ params)
    return meshdp.Mean.of(jnp.square(x).sum(-1))


@pytest.fixture(scope="module")
def given():
    """A step and its state."""
    step = meshdp.make_train_step(deep, optax.sgd(0.1), mesh=meshdp.make_mesh())
    return step, step.init(lambda k: jnp.eye(32), jax.random.key(0))


def shape(*shape):
    return {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}


def test_the_largest_microbatch_that_fits_is_found_without_running(given):
    step, state = given
    batch = shape(8 * 256, 32)
    whole = meshdp.find_batch_size(step, state, batch, limit=10**9)
    assert (whole.microbatch, whole.accumulate) == (256, 1)
    less = meshdp.find_batch_size(step, state, batch, limit=whole.bytes * 2 // 3)
    assert less.microbatch * less.accumulate == 256
    assert less.accumulate > 1
    assert less.bytes <= less.limit < dict(less.tried).get(less.accumulate // 2, 10**9)
    with pytest.raises(ValueError, match=r"^Even one example per device and microbatch \(acc"):
        meshdp.find_batch_size(step, state, batch, limit=100)


BYTES = "limit is {}, expected bytes of one device, or None."
EMPTY = (
    "find_batch_size got a batch without examples, a dict. Give the global batch, or its "
    "shapes, whose arrays have the examples along their first dimension."
)
WRONG = {
    "a_limit_of_nothing": (shape(8, 32), 0, BYTES.format(0)),
    "a_negative_limit": (shape(8, 32), -1, BYTES.format(-1)),
    "a_limit_in_words": (shape(8, 32), "16 GB", BYTES.format("'16 GB'")),
    "an_empty_batch": ({}, None, EMPTY),
    "a_scalar": (shape(), None, EMPTY),
    "no_rows": (shape(0, 32), None, EMPTY),
    "rows_that_do_not_divide": (
        shape(12, 32),
        None,
        (
            "The batch has 12 examples (global), which do not divide over 8 devices: 12 % 8 = "
            "4. Give a multiple of 8."
        ),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_compiled(given, case):
    step, state = given
    batch, limit, words = WRONG[case]
    with pytest.raises(ValueError) as e:
        meshdp.find_batch_size(step, state, batch, limit=limit)
    assert str(e.value) == words


def test_what_is_no_step_or_no_state_is_refused(given):
    step, state = given
    with pytest.raises(TypeError) as e:
        meshdp.find_batch_size(meshdp.distributed(lambda s, b: (s, b)), state, shape(8, 32))
    assert str(e.value) == (
        "find_batch_size takes a step of make_train_step, not a Distributed."
    )
    with pytest.raises(TypeError) as e:
        meshdp.find_batch_size(step, {"w": jnp.eye(32)}, shape(8, 32))
    assert str(e.value) == (
        "This step takes a TrainState, not a dict. Make one with step.init(make_model, key)."
    )
