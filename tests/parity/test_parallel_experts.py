"""Experts over `expert` against every expert on every token, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import experts, route
from meshdp.report._hlo import collectives

ROWS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 8, 8, 12, 8, 2
EVERYTHING = np.ones((ROWS, TOKENS, WIDTH), np.float32)
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


@jax.jit
def keys_of(key):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(ROWS))


@jax.jit
def kept(keys):
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (TOKENS, WIDTH)) / 0.8)(keys)


@jax.jit
def oracle(keep):
    """The sum of squares plus both router losses, times the tokens that count."""
    data = batch()
    mask = data["mask"]

    def loss(p):
        x = data["x"] * keep
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

    return jax.value_and_grad(loss)(init(jax.random.key(0)))


def expert(p, x, rows):
    return rows.dot(jnp.tanh(rows.dot(x, p["up"]) + rows.each(p["bias"])), p["down"])


def mean(p, data, keep, capacity):
    x = data["x"] * keep
    routing = route(x @ p["router"], TOP_K, mask=data["mask"])
    params = {name: p[name] for name in ("up", "bias", "down")}
    y, dropped = experts(expert, params, x, routing, capacity=capacity)
    squares = meshdp.Mean.of(((y - data["y"]) ** 2).sum(-1), data["mask"])
    extra = 0.1 * routing.load_balance + 0.01 * routing.z
    return meshdp.Mean(squares.total + extra * squares.weight, squares.weight), dropped


def check(loss, grads, keep=EVERYTHING):
    want, want_grads = oracle(keep)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name, expected in want_grads.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            grads[name], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name
        )


def step_of(sizes, capacity):
    def step(params, data):
        def loss(p):
            m, dropped = mean(p, data, EVERYTHING, capacity)
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
        m, dropped = mean(model, data, kept(keys), capacity)
        return m, {"dropped": meshdp.Mean(dropped.astype(jnp.float32), 1.0)}

    mesh = meshdp.make_mesh(data=2, expert=4)
    step = meshdp.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, layout=LAYOUT)
    state = step.init(init, jax.random.key(0))
    grads, metrics = step.gradients(state, batch())
    check(metrics["loss"], grads, kept(keys_of(jax.random.fold_in(state.key, state.step))))
    assert metrics["dropped"] == 0


@pytest.mark.parametrize("capacity", [4.0, None], ids=["capacity", "dropless"])
def test_without_a_mesh_experts_are_a_plain_function(capacity):
    f = lambda p: mean(p, batch(), EVERYTHING, capacity)[0].value()
    check(*jax.jit(jax.value_and_grad(f))(init(jax.random.key(0))))


def test_tokens_travel_by_all_to_all_alone():
    step = step_of(dict(expert=8), 4.0)
    shapes = jax.eval_shape(init, jax.random.key(0))
    found = collectives(step.lower(shapes, batch()).compile(), step.mesh)
    large = [c for c in found if c.bytes > 2 * ROWS * TOKENS * WIDTH]
    # Out and back, and the way back again for the gradients; the tokens themselves need none.
    assert [c.kind for c in large] == ["all-to-all"] * 3
    # Each device chooses for its own tokens: the compiler would gather those of all of them.
    assert "all-gather" not in {c.kind for c in found}


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


def forced(choices, experts):
    """Routing of one example with these first choices."""
    return route(jax.nn.one_hot(jnp.array([choices]), experts) * 9, 1)


@pytest.mark.parametrize("capacity", [4.0, None], ids=["capacity", "dropless"])
def test_a_place_that_stays_empty_makes_no_gradient_nan(capacity):
    x = np.random.default_rng(0).standard_normal((1, 16, 4)).astype(np.float32)
    # Has no derivative at a row of zeros.
    unit = lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True))
    f = lambda w, x, rows: rows.dot(unit(x), w)

    def loss(w, x):
        return experts(f, w, x, forced([0] * 3 + [2] * 13, 3), capacity=capacity)[0].sum()

    got = jax.jit(jax.grad(loss, (0, 1)))(jnp.ones((3, 4, 4)), x)
    plain = lambda w, x: (unit(x[0, :3]) @ w[0]).sum() + (unit(x[0, 3:]) @ w[2]).sum()
    want = jax.grad(plain, (0, 1))(jnp.ones((3, 4, 4)), jnp.asarray(x))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_dropless_experts_work_only_on_blocks_that_hold_a_row():
    sizes = []
    choices = [0] * 30 + [2] * 2  # blocks of 8 rows: 4 of expert 0, 1 of expert 2

    def f(w, x, rows):
        jax.debug.callback(lambda x: sizes.append(len(x)), x)
        return rows.dot(x, w)

    run = jax.jit(lambda w, x: experts(f, w, x, forced(choices, 4), capacity=None)[0])
    run(jnp.ones((4, 2, 2)), jnp.ones((1, 32, 2)))
    jax.effects_barrier()
    assert sizes == [8] * 5


@pytest.mark.parametrize("capacity", [4.0, None], ids=["capacity", "dropless"])
def test_what_the_function_closes_over_is_differentiated_and_vectorised(capacity):
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3, 3), (2, 1, 8, 3)))
    choices = [0, 1, 1, 2, 3, 3, 3, 0]

    def loss(scale, w, x):
        f = lambda w, x, rows: scale * rows.dot(x, w)
        return experts(f, w, x, forced(choices, 4), capacity=capacity)[0].sum() ** 2

    def plain(scale, w, x):
        return (scale * jnp.einsum("td,tdh->th", x[0], w[np.array(choices)])).sum() ** 2

    over = lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, 0))(jnp.arange(2.0) + 1, w, x)
    for a, b in zip(jax.jit(lambda: over(loss))(), over(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_every_argument_that_does_not_fit_is_named_at_once():
    def step(state, x):
        routing = route(jnp.zeros((3, 15, 6)), 2)
        return state, experts(expert, {"up": jnp.zeros((4, 2))}, x, routing, capacity=-1)

    step = meshdp.distributed(
        step, mesh=meshdp.make_mesh(data=2, expert=4), batch=P(), layout=meshdp.replicate()
    )
    with pytest.raises(ValueError) as e:
        step({"w": jnp.zeros(8)}, np.ones((3, 15, 2), np.float32))
    assert str(e.value) == (
        "experts cannot use these arguments:\n"
        "  params: first dimensions (4,); the router has 6 experts, so each takes (6, ...)\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4\n"
        "  tokens: 15 do not divide by expert=4; give 12 or 16\n"
        "  experts: 6 do not divide by expert=4; give 4 or 8\n"
        "  capacity: -1; it takes a number above 0, or None"
    )


@pytest.mark.parametrize(
    "f, words",
    [
        (
            lambda w, x, rows: x[:3],
            """experts: f was given 8 rows of shape (2,) and returned an array of shape (3, 2).
            Return one row for each: [rows, width].""",
        ),
        (
            lambda w, x, rows: rows.dot(x, w[0]),
            """rows.dot takes rows [rows, in] and a weight [experts, in, out], but their shapes
            are (8, 2) and (2, 2) (of the experts that are together here). For a bias [experts,
            out] use rows.each.""",
        ),
        (
            lambda w, x, rows: rows.each(w),
            """rows.each takes a bias [experts, out], but its shape is (1, 2, 2) (of the experts
            that are together here). For a weight use rows.dot.""",
        ),
    ],
    ids=["result", "dot", "each"],
)
def test_what_an_experts_function_does_wrong_is_said(f, words):
    with pytest.raises(ValueError) as e:
        experts(f, jnp.ones((4, 2, 2)), jnp.ones((1, 8, 2)), forced([0] * 8, 4), capacity=None)
    assert str(e.value) == " ".join(words.split())


def test_a_routing_is_made_by_route():
    with pytest.raises(TypeError) as e:
        experts(expert, {}, jnp.ones((1, 8, 2)), (1, 2))  # type: ignore[arg-type]
    assert str(e.value) == "experts takes routing from meshdp.parallel.route, not tuple."


def test_route_names_what_does_not_fit():
    with pytest.raises(ValueError) as e:
        route(jnp.zeros((2, 3, 4)), 5, mask=jnp.ones(3))
    assert str(e.value) == (
        "route cannot use these arguments:\n"
        "  top_k: 5; it takes a whole number from 1 to the 4 experts\n"
        "  mask: shape (3,); it takes (2, 3)"
    )


def test_dropless_experts_keep_nothing_inside_them_for_the_worst_case():
    mesh, tokens = meshdp.make_mesh(expert=8), 64

    def temporaries(hidden):
        def loss(w, x):
            f = lambda w, x, rows: rows.dot(jnp.tanh(rows.dot(x, w[0])), w[1])
            return experts(f, w, x, route(x, 2), capacity=None)[0].sum()

        shape = lambda *s: jax.ShapeDtypeStruct(
            s, jnp.float32, sharding=NamedSharding(mesh, P("expert"))
        )
        args = (shape(8, 8, hidden), shape(8, hidden, 8)), shape(8, tokens, 8)
        with jax.set_mesh(mesh):
            program = jax.jit(jax.grad(loss)).lower(*args).compile()
        return program.memory_analysis().temp_size_in_bytes

    # All tokens of the 8 devices may come to one.
    assert temporaries(1024) - temporaries(64) < 4 * 960 * 8 * tokens / 2
