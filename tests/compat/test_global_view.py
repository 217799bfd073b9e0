"""A pmap-style step on a mesh, its body unchanged; the oracle is NumPy or plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import compat
from meshdp._layout import fsdp
from meshdp._mesh import make_mesh

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 16)).astype(np.float32)
Y = RNG.standard_normal((32, 8)).astype(np.float32)
W = RNG.standard_normal((16, 8)).astype(np.float32)
OPTIM = optax.adam(0.1)


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def step(state, x, y):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lax.pmean(grads, axis_name="batch")
    updates, opt_state = OPTIM.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), lax.pmean(loss, "batch")


def start():
    params = {"w": jnp.asarray(W)}
    return params, OPTIM.init(params)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ({"data": 8}, None),
        ({"data": 2, "fsdp": 4}, fsdp(min_size=1)),
        ({"fsdp": 8}, fsdp(min_size=1)),
    ],
    ids=["data", "data_fsdp", "fsdp"],
)
def test_the_step_runs_on_the_mesh_with_the_numbers_of_one_device(shape, layout):
    run = compat.global_view(step, mesh=make_mesh(**shape), layout=layout, donate_argnums=0)
    state, want = start(), start()
    first = None
    for _ in range(3):
        state, loss = run(state, X, Y)
        first = state if first is None else first
        grads = jax.grad(loss_fn)(want[0], X, Y)
        want_loss = loss_fn(want[0], X, Y)
        updates, opt_state = OPTIM.update(grads, want[1])
        want = (optax.apply_updates(want[0], updates), opt_state)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    np.testing.assert_allclose(state[0]["w"], want[0]["w"], rtol=1e-4, atol=1e-6)
    # ...laid out as asked, the optimiser's state included, and the old state is gone.
    held = 16 * 8 // shape.get("fsdp", 1)
    for w in (state[0]["w"], state[1][0].mu["w"]):
        assert w.addressable_data(0).size == held
    assert first[0]["w"].is_deleted()


def test_the_batch_is_split_over_the_devices_and_the_gradient_reduced_once():
    run = compat.global_view(step)
    text = run.lower(start(), X, Y).compile().as_text()
    assert "f32[4,16]" in text  # 32 rows over 8 devices
    assert "all-reduce" in text


def test_every_collective_is_that_of_one_replica():
    def f(x):
        rows = [lax.psum(x, "i"), lax.pmax(x, "i"), lax.all_gather(x, "i")[0]]
        rows += [lax.ppermute(x, "i", [(0, 0)]), lax.all_to_all(x[None], "i", 0, 0)[0]]
        return [*rows, lax.psum_scatter(x[None], "i"), x + lax.axis_index("i")], lax.psum(
            1, "i"
        )

    rows, one = compat.global_view(f, "i", batch_argnums=0)(X)
    assert one == 1
    for row in rows:
        np.testing.assert_array_equal(row, X)


def test_what_pmap_returned_is_taken_apart():
    run = compat.global_view(compat.pmap(step, "batch"))
    (params, _), _ = run(start(), X, Y)
    grads = jax.grad(loss_fn)({"w": W}, X, Y)
    # Adam's first step is the sign of the gradient.
    np.testing.assert_allclose(params["w"], W - 0.1 * np.sign(grads["w"]), atol=1e-4)


def test_keys_and_scalars_are_copied_and_static_arguments_pass():
    def f(w, x, key, scale, name):
        return w + lax.pmean(x.mean(0) * scale + jax.random.normal(key, (16,)), "batch"), len(
            name
        )

    run = compat.global_view(f, static_argnums=4)
    key = jax.random.key(0)
    out, n = run(np.zeros(16, np.float32), X, key, 2.0, "abc")
    np.testing.assert_allclose(
        out, 2 * X.mean(0) + jax.random.normal(key, (16,)), rtol=1e-4, atol=1e-5
    )
    assert n == 3


def test_arguments_in_place_are_not_moved_and_nothing_compiles_again():
    traces = []
    run = compat.global_view(lambda w, x: (traces.append(0), (w + x.mean(), x))[1])
    w, x = run(np.float32(0), X)
    with jax.transfer_guard("disallow"):
        w, x = run(w, x)
    assert len(traces) == 1


def test_another_axis_name_is_explained():
    with pytest.raises(NameError) as e:
        compat.global_view(step, "data")(start(), X, Y)
    assert str(e.value) == (
        "no pmap in sight has an axis called 'batch'; the axes in sight are called 'data': use "
        "one of these, or write pmap(f, axis_name='batch')"
    )


def test_the_state_keeps_its_layout_where_the_compiler_would_choose_another():
    x = np.ones((32, 16), np.float32)
    for f in (lambda w, x: (w + x, x), lambda w, x: w + x):
        new = jax.tree.leaves(compat.global_view(f)(np.zeros_like(x), x))[0]
        assert new.sharding.is_fully_replicated
