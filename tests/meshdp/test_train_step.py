"""`make_train_step`: exact sums, and what it does with odd losses, models and batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp._place import shard_batch

ROWS, D = 32, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, D)).astype(np.float32)
Y = RNG.normal(size=(ROWS,)).astype(np.float32)
W = RNG.normal(size=(D,)).astype(np.float32)
RATE = 0.1


def squares(w, batch, keys):
    losses = jnp.square(batch["x"] @ w - batch["y"])
    return meshdp.Mean.of(losses, batch.get("mask"))


def by_hand(w, mask=None, x=X, y=Y):
    """The loss, the gradient and the next weights, in NumPy and float64."""
    x, y, w = (np.float64(a) for a in (x, y, w))
    mask = np.ones(len(x)) if mask is None else np.float64(mask)
    error = x @ w - y
    loss = (mask * error**2).sum() / mask.sum()
    grad = 2 * (mask * error) @ x / mask.sum()
    return loss, grad, w - RATE * grad


def make(loss_fn=squares, optimizer=None, sizes=(("data", 8),), **options):
    mesh = meshdp.make_mesh(**dict(sizes))
    return meshdp.make_train_step(loss_fn, optimizer or optax.sgd(RATE), mesh=mesh, **options)


def started(step, model=lambda key: jnp.asarray(W)):
    return step.init(model, jax.random.key(0))


MASKS = {
    "none": None,
    "one_row_of_all": np.arange(ROWS) == 17,
    "the_first_device_only": np.arange(ROWS) < 3,
    "weights": np.arange(ROWS) * 0.25,
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_step_is_that_of_the_mean_over_what_counts_wherever_it_lies(mask):
    batch = {"x": X, "y": Y} | ({} if MASKS[mask] is None else {"mask": MASKS[mask]})
    loss, grad, after = by_hand(W, MASKS[mask])
    weight = ROWS if MASKS[mask] is None else MASKS[mask].sum()
    for sizes, accumulate in [((("data", 8),), 4), ((("data", 2), ("fsdp", 2)), 2)]:
        layout = meshdp.by_path({"": P("fsdp")})
        devices = jax.devices()[: np.prod([n for _, n in sizes])]
        step = meshdp.make_train_step(
            squares,
            optax.sgd(RATE),
            mesh=meshdp.make_mesh(**dict(sizes), devices=devices),
            layout=layout,
            accumulate=accumulate,
        )
        state, metrics = step(started(step), batch)
        np.testing.assert_allclose(state.model, after, rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["weight"], weight, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grad), rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_key_of_an_example_is_its_own_wherever_it_is_computed(accumulate):
    def loss_fn(w, batch, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return squares(w, batch, keys), {"noise": meshdp.Mean.of(batch["place"] * noise)}

    step = make(loss_fn, sizes=(("data", 4), ("fsdp", 2)), accumulate=accumulate)
    state, places = started(step), np.arange(ROWS, dtype=np.float32)
    run_key = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    for i in range(2):
        key = jax.random.fold_in(run_key, i)
        noise = [jax.random.normal(jax.random.fold_in(key, j)) for j in range(ROWS)]
        state, metrics = step(state, {"x": X, "y": Y, "place": places})
        np.testing.assert_allclose(
            metrics["noise"], np.mean(places * np.array(noise)), rtol=1e-5
        )


def test_typed_and_raw_keys_give_the_same_run():
    def loss_fn(w, batch, keys):
        return meshdp.Mean.of(jax.vmap(lambda x, k: x @ w * jax.random.normal(k))(batch, keys))

    step, seen = make(loss_fn), []
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        state = step.init(lambda k: jax.random.normal(k, (D,)), key)
        state, metrics = step(state, X)
        state, metrics = step(state, X)
        seen.append((np.asarray(state.model), float(metrics["loss"])))
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]


def test_further_means_have_weights_of_their_own():
    def loss_fn(w, batch, keys):
        positive = meshdp.Mean.of(batch["x"], batch["x"] > 0)
        return squares(w, batch, keys), {"positive": positive, "rows": meshdp.Mean.of(Y[:1])}

    step = make(loss_fn, accumulate=2)
    _, metrics = step(started(step), {"x": X, "y": Y})
    np.testing.assert_allclose(metrics["positive"], X[X > 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rows"], Y[0], rtol=1e-6)
    assert {m.dtype for m in metrics.values()} == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.filterwarnings("ignore:No example counts:RuntimeWarning")
@pytest.mark.parametrize("skip", [True, False])
def test_where_nothing_counts_the_loss_is_nan_and_nothing_is_learnt(skip):
    step = make(optimizer=optax.adam(RATE), skip=skip)
    state, metrics = step(started(step), {"x": X, "y": Y, "mask": np.zeros(ROWS)})
    assert np.isnan(metrics["loss"])
    assert (float(metrics["weight"]), float(metrics["grad_norm"])) == (0, 0)
    np.testing.assert_array_equal(state.model, W)
    # The optimizer is called unless the step is skipped.
    assert int(state.opt_state[0].count) == (0 if skip else 1)
    assert int(state.step) == 1


def test_whole_numbers_and_what_the_loss_does_not_use():
    def loss_fn(model, batch, keys):
        return squares(model["w"], batch, keys)

    def model(key):
        return {"w": jnp.asarray(W), "unused": jnp.ones(3), "ids": jnp.arange(3), "f": jnp.tanh}

    step = make(loss_fn, optax.adam(RATE), sizes=(("data", 2), ("fsdp", 4)))
    state = started(step, model)
    grads, _ = step.gradients(state, {"x": X, "y": Y})
    assert (grads["ids"], grads["f"]) == (None, None)
    np.testing.assert_array_equal(grads["unused"], np.zeros(3))
    np.testing.assert_allclose(grads["w"], by_hand(W)[1], rtol=1e-5)
    assert state.opt_state[0].mu["ids"] is None
    state, _ = step(state, {"x": X, "y": Y})
    np.testing.assert_array_equal(state.model["ids"], [0, 1, 2])
    np.testing.assert_array_equal(state.model["unused"], np.ones(3))
    assert state.model["f"] is jnp.tanh


def test_gradients_are_laid_out_as_the_optimizer_gets_them_and_no_step_is_taken():
    step = make(
        lambda w, x, keys: meshdp.Mean.of(x @ w),
        sizes=(("data", 4), ("fsdp", 2)),
        layout=meshdp.fsdp(min_size=64),
    )
    state = started(step, lambda key: jnp.ones((64, 64)))
    for _ in range(2):
        grads, metrics = step.gradients(state, np.ones((8, 64), np.float32))
    assert grads.addressable_data(0).shape == (32, 16)
    assert (int(state.step), state.model.is_deleted()) == (0, False)


def test_a_step_without_a_mesh_chooses_one_for_its_gradients_too():
    step = meshdp.make_train_step(squares, optax.sgd(RATE))
    state = make().init(lambda key: jnp.asarray(W), jax.random.key(0))
    grads, _ = step.gradients(state, {"x": X, "y": Y})
    np.testing.assert_allclose(grads, by_hand(W)[1], rtol=1e-5)
    assert step.mesh.shape["data"] == 8


def test_one_device_will_do():
    step = meshdp.make_train_step(
        squares,
        optax.sgd(RATE),
        mesh=meshdp.make_mesh(devices=jax.devices()[3:4]),
        accumulate=4,
    )
    state, _ = step(started(step), {"x": X, "y": Y})
    np.testing.assert_allclose(state.model, by_hand(W)[2], rtol=1e-5)
    assert state.model.devices() == {jax.devices()[3]}


def test_a_batch_may_hold_static_leaves_keys_and_none():
    seen = []

    def loss_fn(w, batch, keys):
        seen.append((batch["mode"], batch["none"]))
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return squares(w, {k: batch[k] for k in "xy"}, keys), {"n": meshdp.Mean.of(noise)}

    step = make(
        loss_fn, layout=meshdp.by_path({"": P("fsdp")}), sizes=(("fsdp", 4), ("data", 2))
    )
    keys = jax.random.split(jax.random.key(1), ROWS)
    batch = {"x": X, "y": Y, "mode": "train", "none": None, "key": keys}
    state, metrics = step(started(step), batch)
    np.testing.assert_allclose(
        metrics["n"], jax.vmap(jax.random.normal)(keys).mean(), rtol=1e-5
    )
    assert set(seen) == {("train", None)}


def test_sequences_of_a_batch_may_be_split_over_another_axis():
    step = meshdp.make_train_step(
        lambda w, batch, keys: meshdp.Mean.of(jnp.square(batch["x"] @ w), batch["mask"]),
        optax.sgd(RATE),
        mesh=meshdp.make_mesh(data=2, seq=4),
        batch=P(("data", "fsdp"), "seq"),
    )
    x, mask = X.reshape(4, 8, D), np.arange(4) != 1
    batch = shard_batch({"x": x, "mask": mask}, step.mesh, P(("data", "fsdp"), "seq"))
    assert batch["x"].addressable_data(0).shape == (2, 2, D)
    state, metrics = step(started(step), batch)
    rows = X[np.repeat(mask, 8)]
    np.testing.assert_allclose(metrics["loss"], np.square(rows @ W).mean(), rtol=1e-5)


def test_an_equinox_model_with_dropout_and_functions_trains():
    def model(key):
        layers = [
            eqx.nn.Linear(D, 8, key=key),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(8, 1, key=key),
        ]
        return eqx.nn.Sequential(layers)

    def loss_fn(model, batch, keys):
        out = jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)
        return meshdp.Mean.of(jnp.square(out[:, 0] - batch["y"]))

    sizes = (("data", 2), ("fsdp", 2), ("tensor", 2))
    step = make(loss_fn, sizes=sizes, layout=meshdp.fsdp(min_size=8), accumulate=2)
    state = started(step, model)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2**31 - 1), 0)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(ROWS))
    arrays, rest = eqx.partition(model(jax.random.key(0)), eqx.is_array)
    want = jax.jit(
        jax.value_and_grad(
            lambda a: loss_fn(eqx.combine(a, rest), {"x": X, "y": Y}, keys).value()
        )
    )(arrays)
    grads, metrics = step.gradients(state, {"x": X, "y": Y})
    np.testing.assert_allclose(metrics["loss"], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_bfloat16_parameters_stay_bfloat16_and_their_loss_is_summed_in_float32():
    def loss_fn(w, batch, keys):
        return meshdp.Mean.of(batch["x"].astype(jnp.bfloat16) @ w)

    step = make(loss_fn, optax.adam(RATE), sizes=(("data", 2), ("fsdp", 4)), accumulate=2)
    state = started(step, lambda key: jnp.asarray(W, jnp.bfloat16))
    state, metrics = step(state, {"x": X})
    assert (state.model.dtype, state.opt_state[0].mu.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert metrics["loss"].dtype == jnp.float32
    out = X.astype(jnp.bfloat16).astype(np.float32) @ W.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(metrics["loss"], out.mean(), rtol=0.02)


def test_complex_parameters_descend_as_on_one_device():
    def loss_fn(z, batch, keys):
        return meshdp.Mean.of(jnp.abs(batch["x"] @ z - batch["y"]) ** 2)

    z = jnp.asarray(W + 1j * W[::-1])
    layout = meshdp.by_path({"": P("fsdp")})
    step = make(loss_fn, sizes=(("data", 2), ("fsdp", 4)), layout=layout)
    grads, metrics = step.gradients(started(step, lambda key: z), {"x": X, "y": Y})
    want = jax.grad(lambda z: loss_fn(z, {"x": X, "y": Y}, None).value())(z)
    np.testing.assert_allclose(grads, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(want), rtol=1e-5)
