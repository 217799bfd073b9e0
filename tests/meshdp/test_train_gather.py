"""A loss may do anything with weights that are split: the gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp

LAYERS, D, ROWS = 4, 8, 8
RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((D, D)).astype(np.float32) / 3,
    "v": RNG.standard_normal((D, D)).astype(np.float32) / 3,
    "stack": RNG.standard_normal((LAYERS, D, D)).astype(np.float32) / 3,
    "bias": RNG.standard_normal((LAYERS, D)).astype(np.float32),
    "table": RNG.standard_normal((12, D)).astype(np.float32),
    "index": np.arange(D, dtype=np.int32)[::-1].copy(),
}
BATCH = {
    "x": RNG.standard_normal((ROWS, D)).astype(np.float32),
    "t": RNG.integers(0, 12, (ROWS,)).astype(np.int32),
}


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


softsign.defjvps(lambda t, out, x: t / (1 + jnp.abs(x)) ** 2)


@jax.custom_vjp
def clipped(x):
    return x * 2.0


clipped.defvjp(lambda x: (x * 2.0, x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0),))


def layer(x, w):
    return jnp.tanh(x @ w), None


def custom_jvp(p, x, t):
    return softsign(x @ softsign(p["w"]))


def custom_vjp(p, x, t):
    return clipped(x @ clipped(p["w"]))


def jitted_inside(p, x, t):
    return jax.jit(lambda w, x: jax.jit(jnp.tanh)(x @ w.T))(p["w"], x)


def while_loop(p, x, t):
    # Not differentiable in reverse, so it only counts.
    steps = jax.lax.while_loop(
        lambda c: c[1] < 5, lambda c: (c[0] + jnp.abs(p["w"]).sum(), c[1] + 1), (0.0, 0)
    )[0]
    return x @ p["w"] * jax.lax.stop_gradient(steps)


def fori_loop(p, x, t):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), x)


def cond_on_data(p, x, t):
    one = lambda x, t: jax.lax.cond(t > 5, lambda: x @ p["w"], lambda: x @ p["v"])
    return jax.lax.map(lambda xt: one(*xt), (x, t))


def switch_on_weights(p, x, t):
    return jax.lax.switch(p["index"][0] % 2, [lambda w: x @ w, lambda w: x @ w.T], p["w"])


def embedding(p, x, t):
    return jnp.tanh(x + p["table"][t])


def tied_embedding(p, x, t):
    return jnp.tanh(x + p["table"][t]) @ p["table"].T


def integer_weights(p, x, t):
    return (x @ p["w"])[:, p["index"]] * p["index"][None]


def indexing(p, x, t):
    w = p["stack"]
    return x @ w[0] + x @ w[-1, ::2].repeat(2, 0) + x @ w[1:3].sum(0) + x[:, :2] @ w[3, 2:4]


def dynamic_indexing(p, x, t):
    return jnp.einsum("bd,bde->be", x, p["stack"][t % LAYERS]) + x @ jnp.take(
        p["stack"], t[0] % 2, axis=0
    )


def many_uses(p, x, t):
    for _ in range(6):
        x = jnp.tanh(x @ p["w"])
    return x


def a_loop_in_python_over_a_stack(p, x, t):
    for i in range(LAYERS):
        x = jnp.tanh(x @ p["stack"][i] + p["bias"][i][None])
    return x


def scan(p, x, t):
    return jax.lax.scan(layer, x, p["stack"])[0]


def scan_unrolled(p, x, t):
    return jax.lax.scan(layer, x, p["stack"], unroll=2)[0]


def scan_reversed_with_outputs(p, x, t):
    def body(x, wb):
        w, b = wb
        y = jnp.tanh(x @ w + b[None])
        return y, (y.mean(), w)

    x, (means, ws) = jax.lax.scan(body, x, (p["stack"], p["bias"]), reverse=True)
    return x + means[1] + ws[2][:1]


def scan_of_checkpointed_layers(p, x, t):
    return jax.lax.scan(jax.checkpoint(layer), x, p["stack"])[0]


def checkpointed_layers(p, x, t):
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
    return block(block(x, p["w"]), p["v"])


def scan_over_data(p, x, t):
    def cell(h, x):
        return jnp.tanh(h @ p["w"] + x @ p["v"]), h

    h, hs = jax.lax.scan(cell, jnp.zeros((1, D)), x[:, None])
    return hs[:, 0] + h


def weights_as_carry(p, x, t):
    def body(w, v):
        return jnp.tanh(w @ v), None

    return x @ jax.lax.scan(body, p["w"], p["stack"])[0]


def scan_in_scan(p, x, t):
    stack = p["stack"].reshape(2, 2, D, D)
    inner = lambda x, ws: jax.lax.scan(layer, x, ws)
    return jax.lax.scan(lambda x, ws: (inner(x, ws)[0], None), x, stack)[0]


def views(p, x, t):
    heads = p["w"].reshape(D, 4, 2)  # a dimension that is split becomes two
    merged = p["stack"].transpose(1, 0, 2).reshape(D, LAYERS * D)
    wide = jnp.broadcast_to(p["v"][None], (3, D, D))
    y = jnp.einsum("bd,dhk->bhk", x, heads).reshape(-1, D) + (x @ merged)[:, ::LAYERS]
    return y + jnp.einsum("bd,kde->be", x, wide) + p["w"].T[3:4]


def half_precision(p, x, t):
    w = jnp.stack([p["w"], p["v"]]).astype(jnp.bfloat16).swapaxes(1, 2)
    return (x.astype(jnp.bfloat16) @ w[0] @ p["v"].astype(jnp.bfloat16)).astype(jnp.float32)


def an_ensemble(p, x, t):
    return jax.vmap(lambda w: jnp.tanh(x @ w))(p["stack"]).mean(0)


def an_inner_gradient(p, x, t):
    inner = lambda w: jnp.square(x @ w).mean()
    return x @ (p["w"] - 0.1 * jax.grad(inner)(p["w"]))


def a_whole_matrix(p, x, t):
    return x @ jnp.linalg.inv(p["w"] @ p["w"].T + jnp.eye(D)) / jnp.linalg.norm(p["v"])


def a_bit_of_everything(p, x, t):
    return a_loop_in_python_over_a_stack(p, scan(p, x @ p["w"], t), t)


def a_weight_alone(p, x, t):
    return p["w"]


LOSSES = [
    custom_jvp,
    custom_vjp,
    jitted_inside,
    while_loop,
    fori_loop,
    cond_on_data,
    switch_on_weights,
    embedding,
    tied_embedding,
    integer_weights,
    indexing,
    dynamic_indexing,
    many_uses,
    a_loop_in_python_over_a_stack,
    scan,
    scan_unrolled,
    scan_reversed_with_outputs,
    scan_of_checkpointed_layers,
    checkpointed_layers,
    scan_over_data,
    weights_as_carry,
    scan_in_scan,
    views,
    an_ensemble,
    an_inner_gradient,
    a_whole_matrix,
    a_weight_alone,
]


def total(apply, p, batch):
    """Rows do not see each other, but for what a scan over them carries on one device."""
    return jnp.square(apply(p, batch["x"], batch["t"]) - 0.5)


def loss_fn(apply, p, batch, keys):
    one = lambda x, t: total(apply, p, {"x": x[None], "t": t[None]}).mean()
    return meshdp.Mean.of(jax.vmap(one)(batch["x"], batch["t"]))


def check(apply, layout, rtol=1e-4, **options):
    mesh = meshdp.make_mesh(data=2, fsdp=2, tensor=2)
    step = meshdp.make_train_step(
        functools.partial(loss_fn, apply), optax.sgd(0.1), mesh=mesh, layout=layout, **options
    )
    state = step.init(lambda key: jax.tree.map(jnp.asarray, WEIGHTS), jax.random.key(0))
    grads, metrics = step.gradients(state, BATCH)
    params = {k: v for k, v in WEIGHTS.items() if k != "index"}

    def mean(params):
        p = {**jax.tree.map(jnp.asarray, WEIGHTS), **params}
        return loss_fn(apply, p, BATCH, None).value()

    loss, want = jax.jit(jax.value_and_grad(mean))(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=0.1 * rtol)
    assert grads.pop("index") is None
    for name in params:
        a, b = np.asarray(grads[name]), np.asarray(want[name])
        np.testing.assert_allclose(a, b, rtol, 0.1 * rtol * np.abs(b).max(), err_msg=name)


BOTH = meshdp.by_path(
    {
        r"'(w|v|table)'": P("fsdp", "tensor"),
        r"stack": P(None, "tensor", "fsdp"),
        r"bias": P(None, "fsdp"),
        r"index": P("fsdp"),
    }
)


@pytest.mark.parametrize("apply", LOSSES, ids=lambda f: f.__name__)
def test_the_gradient_is_that_of_one_device(apply):
    check(apply, BOTH)


@pytest.mark.parametrize("gather", ["microbatch", "step"])
def test_the_gradient_of_accumulated_microbatches_is_that_of_one_device(gather):
    check(a_bit_of_everything, BOTH, accumulate=2, gather=gather)


def test_the_loss_may_cast_weights():
    check(half_precision, BOTH, rtol=0.05)


LAYOUTS = {
    "fsdp_on_the_scanned_dimension": {r"stack|bias": P("fsdp")},
    "two_axes_on_one_dimension": {
        r"stack": P(None, ("fsdp", "tensor")),
        r"'w'": P(("fsdp", "tensor")),
    },
    "the_other_way_round": {
        r"stack": P(None, ("tensor", "fsdp")),
        r"'w'": P(("tensor", "fsdp")),
    },
    "data_too": {
        r"stack": P(None, "data", "fsdp"),
        r"'w'": P(("data", "fsdp")),
        r"bias": P(None, "data"),
    },
    "all_on_one_dimension": {
        r"stack": P(None, ("data", "fsdp", "tensor")),
        r"'w'": P(None, ("data", "fsdp", "tensor")),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_may_be_split_in_any_way(layout):
    check(a_bit_of_everything, meshdp.by_path(LAYOUTS[layout]))
