"""`fit`: the loop itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdp
from meshdp.loop import fit

from . import fitting


@pytest.fixture(scope="module")
def step():
    return fitting.make_step(meshdp.make_mesh(data=2, fsdp=4))


def test_training_gives_the_numbers_of_plain_jax_on_one_device(step):
    batches = [fitting.batch(seed=i) for i in range(5)]
    losses = []
    out = fit(
        step,
        fitting.start(step),
        batches,
        steps=5,
        log=None,
        callbacks=[lambda n, m: losses.append((n, m["loss"]))],
    )
    model, want = fitting.oracle(batches)
    assert [n for n, _ in losses] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([x for _, x in losses], want, rtol=1e-5)
    for name in model:
        np.testing.assert_allclose(out.state.model[name], model[name], rtol=1e-4, atol=1e-6)
    assert out.step == 5
    assert out.metrics["loss"] == losses[-1][1]


def test_a_distributed_step_trains_alike():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(w)
        return w - 0.1 * grad, loss

    rows = np.random.default_rng(0).normal(size=(4, 16, 3)).astype(np.float32)
    records = []
    out = fit(step, jnp.ones(3), rows, steps=4, log=records.append, log_every=1)
    w, losses = np.ones(3), []
    for x in rows.astype(np.float64):
        losses.append(((x @ w) ** 2).mean())
        w = w - 0.1 * 2 * x.T @ (x @ w) / 16
    np.testing.assert_allclose(out.state, w, rtol=1e-5)
    found = [r["loss"] for r in records if r["event"] == "train"]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_the_loop_gives_the_device_the_next_step_before_the_last_has_finished():
    @meshdp.distributed(mesh=meshdp.make_mesh(devices=jax.devices()[:1]))
    def step(x, batch):
        # Tens of milliseconds, a hundred times what the loop needs to come round.
        x = jax.lax.fori_loop(0, 20, lambda _, x: x @ x / 500, x + 0 * batch.sum())
        return x, x[0, 0]

    last, had_finished = [], []

    class Watched(type(step)):
        def __call__(self, state, batch):
            had_finished.extend(loss.is_ready() for loss in last)
            state, loss = super().__call__(state, batch)
            last[:] = [loss]
            return state, loss

    step.__class__ = Watched
    batches = [np.ones((1, 2), np.float32)] * 7
    fit(step, jnp.ones((500, 500)), batches, steps=7, log=None)
    # Of the first the loop waits for compilation; if it waited for each, all had finished.
    assert had_finished.count(False) >= 4


def test_a_callback_that_returns_true_ends_the_run(step):
    batches = [fitting.batch()] * 9
    seen = []
    out = fit(
        step,
        fitting.start(step),
        batches,
        steps=9,
        log=None,
        callbacks=[lambda n, m: seen.append(n) or n == 3],
    )
    # The step in flight when the third was read is the last.
    assert (out.step, seen) == (4, [1, 2, 3, 4])


def test_steps_already_taken_count(step):
    out = fit(step, fitting.start(step), [fitting.batch()] * 2, steps=2, log=None)
    again = fit(step, out.state, [fitting.batch()] * 2, steps=4, log=None)
    assert (again.step, int(again.state.step)) == (4, 4)
    none = fit(step, again.state, [], steps=4, log=None)
    assert (none.step, none.metrics) == (4, {})


def test_every_argument_that_cannot_be_is_named(step):
    with pytest.raises(ValueError) as e:
        fit(step, None, [], steps=-1, log_every=0, evaluate_every=3, callbacks=[1], watchdog=5)
    assert str(e.value) == (
        "fit cannot use these arguments:\n"
        "  steps=-1: expected a whole number from 0\n"
        "  log_every=0: expected a whole number from 1\n"
        "  evaluate_every: there is no evaluate= to call\n"
        "  watchdog=5: it takes meshdp.Watchdog(seconds)\n"
        "  callbacks[0]: 1 is no function"
    )
    with pytest.raises(ValueError) as e:
        fit(step, None, [], steps=2.0, checkpoint=5, evaluate=3, mask=1, callbacks=print)
    assert str(e.value) == (
        "fit cannot use these arguments:\n"
        "  steps=2.0: expected a whole number from 0\n"
        "  checkpoint=5: it takes a directory or meshdp.Checkpoints\n"
        "  evaluate=3: it takes meshdp.Evaluation or a function of the state\n"
        "  mask=1: it takes a name\n"
        "  callbacks=<built-in function print>: it takes a list of functions"
    )


def test_numbers_and_answers_may_be_numpy_s(step):
    out = fit(
        step,
        fitting.start(step),
        [fitting.batch()] * 5,
        steps=np.int64(5),
        log=None,
        prefetch=np.int32(1),
        callbacks=[lambda n, m: np.isfinite(m["loss"]) if n == 2 else np.bool_(False)],
    )
    assert out.step == 3


def test_a_plain_function_is_refused_with_the_decorator_to_use():
    with pytest.raises(TypeError) as e:
        fit(lambda s, b: (s, b), None, [], steps=1)
    assert str(e.value) == (
        "fit takes a step made by meshdp.distributed or meshdp.make_train_step, not a "
        "function. Wrap the function: meshdp.distributed(step)."
    )
