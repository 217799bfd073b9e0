"""What `make_train_step` and its steps say when they cannot do as asked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import Mean

X = np.ones((32, 4), np.float32)


def words(error, call, *args, **options):
    with pytest.raises(error) as e:
        call(*args, **options)
    return str(e.value)


def loss_fn(w, batch, keys):
    return Mean.of(batch["x"] @ w)


def step_and_state(loss_fn=loss_fn, sizes=(("data", 8),), **options):
    loss_fn.__qualname__ = "loss_fn"
    mesh = meshdp.make_mesh(**dict(sizes))
    step = meshdp.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, **options)
    return step, step.init(lambda key: jnp.ones(4), jax.random.key(0))


def mean(total, weight=1.0):
    return lambda x: Mean(total(x), weight)


RETURN = (
    "; return meshdp.Mean.of(losses, mask), with one loss per example or token, so that sums "
    "and weights can be added up before dividing"
)
LOSSES = {
    "a_plain_scalar": (lambda x: x.mean(), "the loss is an array of shape ()" + RETURN),
    "losses_that_are_not_summed": (lambda x: x, "the loss is an array of shape (4,)" + RETURN),
    "a_number": (lambda x: 3.0, "the loss is a float" + RETURN),
    "nothing": (lambda x: None, "the loss is a NoneType" + RETURN),
    "three_things": (
        lambda x: (Mean.of(x), {}, {}),
        "the loss is a tuple of 3" + RETURN,
    ),
    "a_mean_of_an_array": (
        mean(lambda x: x),
        (
            "the total of 'loss' is float32[4], not a real scalar; Mean.of(values, mask) sums "
            "for you"
        ),
    ),
    "a_mean_of_one_row": (
        mean(lambda x: x.sum(keepdims=True), jnp.ones((1, 1))),
        (
            "the total of 'loss' is float32[1], not a real scalar; Mean.of(values, mask) sums "
            "for you\n  the weight of 'loss' is float32[1, 1], not a real scalar; "
            "Mean.of(values, mask) sums for you"
        ),
    ),
    "a_flag_as_weight": (
        mean(lambda x: x.sum(), True),
        (
            "the weight of 'loss' is bool[], not a real scalar; Mean.of(values, mask) sums for "
            "you"
        ),
    ),
    "a_complex_loss": (
        mean(lambda x: x.sum() * 1j),
        "the total of 'loss' is complex; take its real part",
    ),
    "aux_that_is_no_dict": (
        lambda x: (Mean.of(x), x.mean()),
        "the auxiliary result is an array of shape (); return (Mean, {name: Mean})",
    ),
    "aux_of_other_things": (
        lambda x: (Mean.of(x), {"norm": x.mean(), "loss": Mean.of(x), "n": Mean(x, 1.0)}),
        (
            "the auxiliary 'norm' is an array of shape (); make it a meshdp.Mean too, since "
            "each device has only its own examples\n"
            "  the auxiliary 'loss' has the name of a metric; rename it\n"
            "  the total of 'n' is float32[4], not a real scalar; Mean.of(values, mask) sums "
            "for you"
        ),
    ),
    "everything_at_once": (
        lambda x: (x.mean(), {"norm": 3.0}),
        (
            "the loss is an array of shape ()"
            + RETURN
            + "\n  the auxiliary 'norm' is a float; "
            "make it a meshdp.Mean too, since each device has only its own examples"
        ),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_no_mean_is_told_what_it_is(case):
    result, what = LOSSES[case]
    step, state = step_and_state(lambda w, batch, keys: result(batch["x"] @ w))
    message = words(ValueError, step, state, {"x": X})
    assert message == "loss_fn must return a Mean:\n  " + what


def test_a_batch_that_does_not_divide_into_microbatches_is_told_what_would():
    step, state = step_and_state(sizes=(("data", 2), ("fsdp", 2), ("tensor", 2)), accumulate=3)
    assert words(ValueError, step, state, {"x": X}) == (
        "batch['x'] has 32 examples (global), which do not divide into accumulate=3 "
        "microbatches on 4 devices: 32 % 12 = 8. Give 24 or 36, or pad with "
        "meshdp.pad_batch(batch, 12) and put the mask into the loss."
    )
    assert words(ValueError, step, state, {"x": X[:4]}) == (
        "batch['x'] has 4 examples (global), which do not divide into accumulate=3 "
        "microbatches on 4 devices: 4 % 12 = 4. Give 12, or pad with "
        "meshdp.pad_batch(batch, 12) and put the mask into the loss."
    )


def test_a_batch_that_does_not_divide_over_the_devices_is_told_by_how_much():
    step, state = step_and_state()
    assert words(ValueError, step, state, {"x": X[:9]}).splitlines()[0] == (
        "The batch has 9 rows, which do not divide over data*fsdp=8: 9 % 8 = 1."
    )


@pytest.mark.parametrize("constant", [np.float32(1), 0.5], ids=["array", "number"])
def test_a_constant_in_the_batch_is_refused(constant):
    step, state = step_and_state()
    assert words(ValueError, step, state, {"x": X, "rate": constant}) == (
        "batch['rate'] is a scalar. Every array of a training batch has the examples along its "
        "first dimension; give constants to the loss by functools.partial."
    )


def test_what_is_no_training_state_is_refused():
    step, state = step_and_state()
    assert words(TypeError, step, {"w": np.ones(4)}, {"x": X}) == (
        "This step takes a TrainState, not a dict. Make one with step.init(make_model, key)."
    )
    assert words(TypeError, step.gradients, state.model, {"x": X}) == (
        "This step takes a TrainState, not an array of shape (4,). Make one with "
        "step.init(make_model, key)."
    )


def test_wrong_arguments_are_told_together():
    own = Mesh(np.array(jax.devices()), ("rows",), axis_types=(AxisType.Auto,))
    spec = P("data")
    message = words(
        ValueError,
        meshdp.make_train_step,
        "loss",
        optax.adam,
        mesh=own,
        batch=spec,
        accumulate=0,
        gather="never",
    )
    assert message == (
        "make_train_step cannot use these arguments:\n"
        "  mesh: has the axes 'rows'; it takes one with 'data' and 'fsdp', of size 1 or more: "
        "meshdp.make_mesh(data=4, fsdp=2)\n"
        f'  batch: {spec}; its first dimension is split over ("data", "fsdp"): '
        'P(("data", "fsdp"))\n'
        "  loss_fn: a str; it takes a function\n"
        "  optimizer: a function; it takes optax.adamw(3e-4)\n"
        "  accumulate: 0; it takes a whole number from 1\n"
        '  gather: \'never\'; it takes "microbatch" or "step"'
    )


@pytest.mark.parametrize("count", [True, 2.0, -1, None], ids=str)
def test_accumulate_is_a_whole_number(count):
    message = words(
        ValueError, meshdp.make_train_step, loss_fn, optax.sgd(0.1), accumulate=count
    )
    assert message == (
        "make_train_step cannot use these arguments:\n"
        f"  accumulate: {count!r}; it takes a whole number from 1"
    )


def test_options_of_the_wrong_type_are_named():
    assert words(
        TypeError, meshdp.make_train_step, loss_fn, optax.sgd(0.1), layout="fsdp", batch="data"
    ) == (
        "These options have the wrong type:\n"
        "  layout: 'fsdp'; it takes a Layout: meshdp.fsdp()\n"
        '  batch: \'data\'; it takes a PartitionSpec: P(("data", "fsdp"))'
    )


def test_a_model_that_cannot_be_split_as_asked_is_named_before_anything_is_made():
    mesh = meshdp.make_mesh(data=2, fsdp=4)
    layout = meshdp.by_path({"w": P("fsdp")})
    step = meshdp.make_train_step(loss_fn, optax.adam(0.1), mesh=mesh, layout=layout)
    made = []

    def make_model(key):
        made.append(key)
        return {"w": jnp.ones(6)}

    message = words(ValueError, step.init, make_model, jax.random.key(0))
    assert ".model['w']" in message
    assert "6 % 4 = 2" in message
    assert all(isinstance(key, jax.core.Tracer) for key in made)
