"""Experts over `expert` against every expert on every token, on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import experts, route
from meshdp.report._hlo import collectives

ROWS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 8, 8, 12, 8, 2
LAYOUT = meshdp.by_path({r"up|bias|down": P("expert"), r"router": P()})


def init(key):
    k = jax.random.split(key, 4)
    return {
        "router": jax.random.normal(k[0], (WIDTH, EXPERTS)),
        "up": jax.random.normal(k[1], (EXPERTS, WIDTH, HIDDEN)) / 3,
        "bias": jax.random.normal(k[2], (EXPERTS, HIDDEN)),
        "down": jax.random.normal(k[3], (EXPERTS, HIDDEN, WIDTH)) / 3,
    }


def batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32),
        "y": rng.standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32),
        "mask": rng.random((ROWS, TOKENS)) < 0.8,
    }


@functools.cache
def oracle():
    """The sum of squares plus both router losses, times the tokens that count."""
    data = batch()
    mask = data["mask"]

    def loss(p):
        x = data["x"]
        logits = x @ p["router"]
        shares = jax.nn.softmax(logits)
        best = jnp.argsort(-shares, -1)[..., :TOP_K]
        chosen = (jnp.arange(EXPERTS).reshape(1, 1, 1, -1) == best[..., None]).any(-2)
        weights = jnp.where(chosen, shares, 0)
        weights = weights / weights.sum(-1, keepdims=True)
        h = jnp.einsum("btd,edh->bteh", x, p["up"]) + p["bias"][None, None]
        each = jnp.einsum("bteh,ehd->bted", jnp.tanh(h), p["down"])
        y = jnp.einsum("bte,bted->btd", weights, each)
        n = mask.sum()
        load = (chosen * mask[..., None]).sum((0, 1)) / (n * TOP_K)
        share = (shares * mask[..., None]).sum((0, 1)) / n
        balance = EXPERTS * (load * share).sum()
        z = ((jnp.log(jnp.exp(logits).sum(-1)) ** 2) * mask).sum() / n
        squares = (((y - data["y"]) ** 2).sum(-1) * mask).sum()
        return squares / n + 0.1 * balance + 0.01 * z

    return jax.jit(jax.value_and_grad(loss))(init(jax.random.key(0)))


def expert(p, x, rows):
    return rows.dot(jnp.tanh(rows.dot(x, p["up"]) + rows.each(p["bias"])), p["down"])


def mean(p, data, capacity):
    routing = route(data["x"] @ p["router"], TOP_K, mask=data["mask"])
    params = {name: p[name] for name in ("up", "bias", "down")}
    y, dropped = experts(expert, params, data["x"], routing, capacity=capacity)
    squares = meshdp.Mean.of(((y - data["y"]) ** 2).sum(-1), data["mask"])
    extra = 0.1 * routing.load_balance + 0.01 * routing.z
    return meshdp.Mean(squares.total + extra * squares.weight, squares.weight), dropped


def check(loss, grads):
    want, want_grads = oracle()
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name, expected in want_grads.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            grads[name], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name
        )


def step_of(sizes, capacity):
    def step(params, data):
        def loss(p):
            m, dropped = mean(p, data, capacity)
            return m.value(), dropped

        (value, dropped), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return params, (value, grads, dropped)

    return meshdp.distributed(step, mesh=meshdp.make_mesh(**sizes), layout=LAYOUT)


@pytest.mark.parametrize(
    "sizes, capacity",
    [(dict(data=2, expert=4), 4.0), (dict(expert=2, seq=2, tensor=2), None)],
    ids=["capacity", "dropless"],
)
def test_experts_have_the_values_and_gradients_of_dense_evaluation(sizes, capacity):
    step = step_of(sizes, capacity)
    params = step.init(init, jax.random.key(0))
    loss, grads, dropped = step(params, batch())[1]
    check(loss, grads)
    assert dropped == 0


@pytest.mark.parametrize("capacity", [4.0, None], ids=["capacity", "dropless"])
def test_experts_in_a_train_step_too(capacity):
    def loss_fn(model, data, keys):
        m, dropped = mean(model, data, capacity)
        return m, {"dropped": meshdp.Mean(dropped.astype(jnp.float32), 1.0)}

    mesh = meshdp.make_mesh(data=2, expert=4)
    step = meshdp.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, layout=LAYOUT)
    state = step.init(init, jax.random.key(0))
    grads, metrics = step.gradients(state, batch())
    check(metrics["loss"], grads)
    assert metrics["dropped"] == 0


@pytest.mark.parametrize("capacity", [4.0, None], ids=["capacity", "dropless"])
def test_without_a_mesh_experts_are_a_plain_function(capacity):
    f = lambda p: mean(p, batch(), capacity)[0].value()
    check(*jax.jit(jax.value_and_grad(f))(init(jax.random.key(0))))


def test_tokens_travel_by_all_to_all_alone():
    step = step_of(dict(expert=8), 4.0)
    shapes = jax.eval_shape(init, jax.random.key(0))
    found = collectives(step.lower(shapes, batch()).compile(), step.mesh)
    large = [c for c in found if c.bytes > 2 * ROWS * TOKENS * WIDTH]
    # Out and back, and the way back again for the gradients; the tokens themselves need none.
    assert [c.kind for c in large] == ["all-to-all"] * 3


def test_what_does_not_fit_is_dropped_and_counted():
    # All 16 tokens choose expert 0 first and 1 second; each takes 4 from each of 2 devices.
    logits = jnp.tile(jnp.array([3.0, 2.0, 1.0, 0.0]), (2, 8, 1))
    params = {"up": jnp.ones((4, 2, 2))}

    def step(params, x):
        routing = route(logits, 2)
        y, dropped = experts(
            lambda p, x, rows: rows.dot(x, p["up"]), params, x, routing, capacity=1.0
        )
        return params, (y, dropped, routing.load)

    mesh = meshdp.make_mesh(expert=2, devices=jax.devices()[:2])
    step = meshdp.distributed(step, mesh=mesh, layout=meshdp.by_path({"up": P("expert")}))
    y, dropped, load = step(params, np.ones((2, 8, 2), np.float32))[1]
    assert dropped == 2 * 2 * (8 - 4)
    kept = np.asarray(y).any(-1).sum()
    assert kept == 2 * 4
    np.testing.assert_allclose(load, [0.5, 0.5, 0, 0])
