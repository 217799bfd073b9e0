"""Evaluation: exact means, and the best that is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.loop import Batches, Checkpoints, Evaluation, fit

from . import fitting

MESH = meshdp.make_mesh(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def step():
    layout = meshdp.by_path({"w": P(None, "tensor")}) | meshdp.fsdp(min_size=1)
    return meshdp.make_train_step(fitting.loss_fn, optax.adam(1e-2), mesh=MESH, layout=layout)


def measure(model, batch):
    y = jnp.tanh(batch["x"] @ model["w"]) @ model["v"]
    wrong = (jnp.argmax(y, -1) != jnp.argmax(batch["y"], -1)).astype(jnp.float32)
    return {
        "loss": fitting.loss_fn(model, batch),
        "error": meshdp.Mean.of(wrong, batch["mask"]),
    }


@pytest.mark.parametrize("examples", [61, 64])
def test_means_are_exact_over_a_set_that_does_not_divide(step, examples):
    data = fitting.make_data(examples)
    state = fitting.start(step)
    found = Evaluation(measure, Batches(data, 16, epochs=1))(state)
    model = {k: np.asarray(v, np.float64) for k, v in state.model.items()}
    y = np.tanh(data["x"] @ model["w"]) @ model["v"]
    wrong = np.argmax(y, -1) != np.argmax(data["y"], -1)
    np.testing.assert_allclose(found["loss"], ((y - data["y"]) ** 2).mean(), rtol=1e-6)
    assert found["error"] == wrong.mean()
    # In the layout of the training: nothing was moved, nothing given away.
    assert state.model["w"].sharding.spec == P("fsdp", "tensor")


def test_a_loss_with_auxiliaries_will_do(step):
    both = lambda m, b: (fitting.loss_fn(m, b), {"error": measure(m, b)["error"]})
    batches = Batches(fitting.make_data(20), 16, epochs=1)
    state = fitting.start(step)
    assert Evaluation(both, batches)(state) == Evaluation(measure, batches)(state)


def test_an_iterator_is_refused():
    with pytest.raises(ValueError) as e:
        Evaluation(measure, iter([1]))
    assert str(e.value) == (
        "Evaluation was given an iterator (list_iterator), which is empty after the first "
        "evaluation. Give a list, meshdp.Batches(..., epochs=1), or a function that returns a "
        "new iterator."
    )


def test_what_cannot_be_measured_is_refused_at_once():
    with pytest.raises(TypeError) as e:
        Evaluation(0.5, [fitting.batch()])
    assert str(e.value) == "Evaluation measures with a function, not with 0.5."
    with pytest.raises(
        TypeError, match="^The batches are a dict, which is one thing, not many"
    ):
        Evaluation(fitting.loss_fn, fitting.batch())


def test_endless_batches_are_refused():
    with pytest.raises(ValueError) as e:
        Evaluation(measure, Batches(fitting.make_data(), 16))
    assert str(e.value) == (
        "Evaluation was given Batches that never end. Give Batches(..., epochs=1)."
    )


def test_a_set_without_batches_is_refused(step):
    with pytest.raises(ValueError) as e:
        Evaluation(measure, [])(fitting.start(step))
    assert str(e.value) == "There were no batches to evaluate on."


def test_what_is_no_mean_is_refused(step):
    wrong = lambda model, batch: {"loss": batch["x"].mean(), "n": 3}
    with pytest.raises(ValueError) as e:
        Evaluation(wrong, [fitting.batch()])(fitting.start(step))
    assert str(e.value).replace(traced(), "TRACED") == (
        "An evaluation must measure Means, so that sums and weights can be added up before "
        "dividing, but it returned:\n"
        "  loss: TRACED\n"
        "  n: int\n"
        "Return {name: meshdp.Mean.of(values, mask)}."
    )


def traced():
    """What the type of a traced array is called on this JAX."""
    found = []
    jax.make_jaxpr(lambda x: found.append(type(x).__name__) or x)(1.0)
    return found[0]


def test_the_best_is_kept_and_known_after_a_restart(step, tmp_path):
    scores = iter([5.0, 2.0, 3.0, 4.0, 6.0, 1.0])
    records = []

    def go(steps):
        return fit(
            step,
            fitting.start(step),
            Batches(fitting.make_data(), 16, seed=0),
            steps=steps,
            checkpoint=Checkpoints(tmp_path, every=100, keep=1, best=1, metric="score"),
            evaluate=lambda state: {"score": next(scores)},
            evaluate_every=2,
            log=records.append,
        )

    out = go(6)
    assert (out.best, out.best_step, out.evaluation) == (2.0, 4, {"score": 3.0})
    assert Checkpoints(tmp_path).steps() == [4, 6]
    out = go(10)
    assert (out.best, out.best_step) == (2.0, 4)
    assert Checkpoints(tmp_path).steps() == [4, 10]
    out = go(12)
    assert (out.best, out.best_step) == (1.0, 12)
    assert Checkpoints(tmp_path).steps() == [12]
    told = [(r["step"], r["best"]) for r in records if r["event"] == "evaluation"]
    assert told == [(2, True), (4, True), (6, False), (8, False), (10, False), (12, True)]


def test_a_function_that_returns_no_numbers_by_name_is_refused(step):
    with pytest.raises(ValueError) as e:
        fit(
            step,
            fitting.start(step),
            [fitting.batch()],
            steps=1,
            evaluate=lambda state: 3.0,
            log=None,
        )
    assert str(e.value) == "evaluate must return {name: number}, but it returned a float."


def test_a_result_that_is_no_number_is_named(step):
    with pytest.raises(ValueError) as e:
        fit(
            step,
            fitting.start(step),
            [fitting.batch()],
            steps=1,
            evaluate=lambda state: {"loss": np.float32(1), "who": "me", "all": np.ones(2)},
            log=None,
        )
    assert str(e.value) == (
        "evaluate must return numbers, but among them were:\n"
        "  who: 'me'\n"
        "  all: array([1., 1.])"
    )


def test_a_metric_that_the_evaluation_does_not_have_is_told_once(step, tmp_path):
    records = []
    fit(
        step,
        fitting.start(step),
        [fitting.batch()] * 2,
        steps=2,
        checkpoint=tmp_path,
        evaluate=lambda state: {"accuracy": 0.5, "error": 2.0},
        evaluate_every=1,
        log=records.append,
    )
    assert [r["text"] for r in records if r["event"] == "note"] == [
        (
            "no checkpoint is kept as the best: the evaluation has no 'loss', but 'accuracy', "
            "'error'; name one with Checkpoints(metric=...)"
        )
    ]
