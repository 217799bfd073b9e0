"""What make_train_step can be asked for, each against plain JAX on one device."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.report._hlo import collectives

from .models import MODELS
from .test_train_step import OPTIMIZER, TENSOR, batches, check, loss_fn, train

MIXED = dict(data=2, fsdp=2, tensor=2)


def make(name, sizes, optimizer=OPTIMIZER, **options):
    return meshdp.make_train_step(
        functools.partial(loss_fn, name),
        optimizer,
        mesh=meshdp.make_mesh(**sizes),
        layout=meshdp.by_path(TENSOR[name]) | meshdp.fsdp(min_size=64),
        **options,
    )


def start(step, name):
    return step.init(MODELS[name][0], jax.random.key(0))


def one_device_gradient(name, batch, cast=lambda x: x):
    """The gradient of the first step's mean loss, of parameters cast on the way."""
    init, apply, losses, _ = MODELS[name]
    params = init(jax.random.key(0))
    run_key = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    key = jax.random.fold_in(run_key, 0)
    keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(len(batch["mask"])))

    @jax.jit
    def gradient(params):
        def mean(params):
            low = jax.tree.map(cast, params)
            out = jax.vmap(apply, in_axes=(None, 0, 0))(low, cast(batch["x"]), keys)
            values = losses(out, batch).astype(jnp.float32)
            return jnp.where(batch["mask"], values, 0).sum() / batch["mask"].sum()

        return jax.value_and_grad(mean)(params)

    return jax.device_get(gradient(params))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialised_layers_give_the_same_numbers(remat):
    check("transformer", *train("transformer", MIXED, remat=remat))


def test_names_say_what_is_kept():
    def loss(params, batch, keys):
        h = checkpoint_name(jnp.tanh(batch["x"] @ params["up"]), "h")
        return meshdp.Mean.of(jnp.square(h @ params["down"]).sum(-1))

    step = meshdp.make_train_step(loss, optax.sgd(0.1), remat="h", mesh=meshdp.make_mesh())
    state = step.init(
        lambda k: {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}, jax.random.key(0)
    )
    _, metrics = step(state, {"x": np.ones((8, 4), np.float32)})
    np.testing.assert_allclose(metrics["loss"], 4 * (8 * np.tanh(4)) ** 2, rtol=1e-5)


def layer(x, w):
    return x + jnp.tanh(jnp.sin(jnp.tanh(x @ w) @ w.T) @ w)


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0]


def in_a_row(params, x):
    for w in params["w"]:
        x = layer(x, w)
    return x


STACK, ROW = jnp.ones((12, 16, 16)), [jnp.ones((16, 16))] * 12


@pytest.mark.parametrize(
    "apply, weights, remat, fewer",
    [
        (scanned, STACK, "full", 3.0),
        (scanned, STACK, "dots", 1.3),
        (in_a_row, ROW, "full", 3.0),
    ],
    ids=["scanned_full", "scanned_dots", "in_a_row_full"],
)
def test_layers_that_are_computed_again_keep_less(apply, weights, remat, fewer):
    def loss(params, batch, keys):
        return meshdp.Mean.of(jnp.square(apply(params, batch["x"])).sum(-1))

    def temporaries(remat):
        step = meshdp.make_train_step(
            loss, optax.sgd(0.1), remat=remat, mesh=meshdp.make_mesh()
        )
        state = step.init(lambda k: {"w": weights}, jax.random.key(0))
        batch = {"x": jax.ShapeDtypeStruct((8 * 512, 16), jnp.float32)}
        analysis = step.lower(state, batch).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries("none") > fewer * temporaries(remat)


@pytest.mark.parametrize("sizes", [dict(data=8), MIXED], ids=["data", "mixed"])
def test_clipping_is_by_the_norm_of_the_whole_gradient(sizes):
    batch = batches("mlp")[0]
    loss, grads = one_device_gradient("mlp", batch)
    norm = float(optax.tree.norm(grads))
    step = make("mlp", sizes, optax.sgd(1.0), clip=norm / 4)
    state = start(step, "mlp")
    old = jax.device_get(state.model)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    want = jax.tree.map(lambda p, g: p - g / 4, old, grads)
    chex.assert_trees_all_close(jax.device_get(state.model), want, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    step = make("mlp", dict(data=4, fsdp=2))
    state = start(step, "mlp")
    before = jax.device_get((state.model, state.opt_state))
    batch = batches("mlp")[0]
    bad = {**batch, "x": np.where(np.arange(32)[:, None] == 7, np.nan, batch["x"])}
    bad["x"] = bad["x"].astype(np.float32)
    with pytest.warns(
        RuntimeWarning, match=r"^The gradient of model\['down'\]\['weight'\] was"
    ):
        state, metrics = step(state, bad)
    chex.assert_trees_all_equal(jax.device_get((state.model, state.opt_state)), before)
    assert (metrics["skipped"], state.guard.in_a_row, state.step) == (1, 1, 1)
    state, metrics = step(state, batch)
    assert (metrics["skipped"], state.guard.in_a_row, state.step) == (1, 0, 2)
    assert not np.array_equal(state.model["up"]["weight"], before[0]["up"]["weight"])


def test_a_state_put_together_by_hand_is_guarded_too():
    step = make("linear", dict(data=8))
    made = start(step, "linear")
    state = meshdp.TrainState(made.model, made.opt_state, made.step, made.key)
    state, _ = step(state, batches("linear")[0])
    assert (state.guard.skipped, state.guard.good) == (0, 1)


def test_a_run_that_gets_nowhere_ends_with_the_parameter_the_step_and_the_batch():
    def loss(params, batch, keys):
        return meshdp.Mean.of(batch["x"] * params["a"] + jnp.sqrt(params["b"]) * batch["x"])

    step = meshdp.make_train_step(loss, optax.sgd(0.1), stop_after=2, mesh=meshdp.make_mesh())
    state = step.init(lambda k: {"a": jnp.ones(()), "b": jnp.zeros(())}, jax.random.key(0))
    batch = {"x": np.arange(8, dtype=np.float32)}
    with (
        pytest.warns(RuntimeWarning, match=r"^The gradient of model\['b'\] was not finite at"),
        pytest.raises(FloatingPointError) as e,
    ):
        for _ in range(6):
            state, _ = step(state, batch)
    assert str(e.value) == (
        "The gradient of model['b'] was not finite at step 1, the last of 2 such steps in a "
        "row.\nThey were skipped: the model is as it was before them. The batch of that step:\n"
        "  batch['x']: float32[8] from 0 to 7\n"
        "Look for labels out of range, a logarithm of or division by 0, or a learning rate "
        "that is too high."
    )


def test_frozen_parts_get_no_gradient_no_optimizer_state_and_no_traffic():
    trains = {"embed": False, "blocks": True, "head": False}
    step = make("transformer", dict(data=8), trains=trains, shard_update=False)
    state = start(step, "transformer")
    frozen = jax.device_get((state.model["embed"], state.model["head"]))
    moments = state.opt_state[0].mu
    assert (moments["embed"], moments["head"]) == (None, None)
    compiled = step.lower(state, batches("transformer")[0]).compile()
    blocks = sorted(x.shape for x in jax.tree.leaves(moments["blocks"]))
    moved = [c.shape for c in collectives(compiled, step.mesh) if len(c.shape) > 1]
    assert sorted(moved) == blocks
    state, _ = step(state, batches("transformer")[0])
    chex.assert_trees_all_equal(
        jax.device_get((state.model["embed"], state.model["head"])), frozen
    )


def test_nothing_that_trains_is_an_error():
    step = make("linear", dict(data=8), trains=lambda x: False)
    with pytest.raises(ValueError) as e:
        start(step, "linear")
    assert str(e.value) == (
        "Nothing in the model trains: of its 2 arrays none is floating-point and chosen by "
        "trains=. Give a filter that keeps some, such as equinox.is_inexact_array."
    )


def test_an_average_of_the_parameters_is_kept_where_their_shares_are():
    step = make("mlp", dict(data=4, fsdp=2), optax.chain(optax.sgd(0.1), meshdp.ema(0.5)))
    state = start(step, "mlp")
    want = jax.device_get(state.model)
    for batch in batches("mlp")[:2]:
        state, _ = step(state, batch)
        want = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, want, jax.device_get(state.model))
    average = meshdp.ema_model(state)
    chex.assert_trees_all_close(jax.device_get(average), want, rtol=1e-6)
    leaf = average["down"]["weight"]
    assert leaf.addressable_data(0).size == leaf.size // 2
    with pytest.raises(ValueError, match="^The optimizer of this state keeps no average. Make"):
        meshdp.ema_model(start(make("linear", dict(data=8)), "linear"))


def test_an_average_of_the_parameters_costs_each_device_its_share_of_them():
    """Of 64 x 128 weights on 8 devices that all hold them whole, an eighth."""

    def loss(w, batch, keys):
        return meshdp.Mean.of(jnp.square(batch["x"] @ w).sum(-1))

    def memory(optimizer):
        step = meshdp.make_train_step(loss, optimizer, mesh=meshdp.make_mesh())
        state = step.init(lambda key: jnp.ones((64, 128)), jax.random.key(0))
        batch = {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
        found = step.lower(state, batch).compile().memory_analysis()
        held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.opt_state))
        return held, found.argument_size_in_bytes, found.temp_size_in_bytes

    share = 64 * 128 * 4 // 8
    without, kept = memory(optax.sgd(0.1)), memory(optax.chain(optax.sgd(0.1), meshdp.ema(0.9)))
    held, arguments, temporaries = np.subtract(kept, without)
    assert (held, arguments) == (share, share)
    assert temporaries <= share


class Normed(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    outer: eqx.nn.Linear

    def __init__(self, key, axes):
        k1, k2 = jax.random.split(key)
        self.inner = eqx.nn.Linear(4, 8, use_bias=False, key=k1)
        self.norm = eqx.nn.BatchNorm(8, axis_name=axes, mode="ema")
        self.outer = eqx.nn.Linear(8, 2, key=k2)

    def __call__(self, x, state):
        x, state = self.norm(self.inner(x), state)
        return self.outer(jax.nn.relu(x)), state


def normed_loss(model, batch, keys, state):
    out, state = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(
        batch["x"], state
    )
    return meshdp.Mean.of(jnp.square(out - batch["y"]).sum(-1)), state


@pytest.mark.parametrize("sizes", [dict(data=8), dict(data=2, fsdp=4)], ids=["data", "fsdp"])
def test_batch_norm_is_over_the_global_batch(sizes):
    rng = np.random.default_rng(0)
    batch = {
        "x": (rng.standard_normal((32, 4)) + np.arange(32)[:, None] / 8).astype(np.float32),
        "y": rng.standard_normal((32, 2)).astype(np.float32),
    }
    step = meshdp.make_train_step(
        normed_loss, optax.sgd(0.05), mesh=meshdp.make_mesh(**sizes), stateful=True
    )
    axes = ("rows", *meshdp.BATCH_AXES)
    state = step.init(lambda k: eqx.nn.make_with_state(Normed)(k, axes), jax.random.key(0))

    model, carried = eqx.nn.make_with_state(Normed)(jax.random.key(0), "rows")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def plain(params, carried):
        def mean(params):
            model = eqx.combine(params, static)
            run = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
            out, new = run(batch["x"], carried)
            return jnp.square(out - batch["y"]).sum(-1).mean(), new

        (loss, new), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), new, loss

    for _ in range(3):
        state, metrics = step(state, batch)
        params, carried, loss = plain(params, carried)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    have, want = jax.tree.leaves(state.model_state), jax.tree.leaves(carried)
    chex.assert_trees_all_close(
        jax.device_get(have), jax.device_get(want), rtol=1e-4, atol=1e-6
    )


def test_tied_embeddings_train_as_on_one_device():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            pair = (
                eqx.nn.Embedding(16, 8, key=key),
                eqx.nn.Linear(8, 16, use_bias=False, key=key),
            )
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token):
            embed, out = self.shared()
            return out(jnp.tanh(embed(token)))

    batch = {"x": np.arange(16) % 16, "y": (np.arange(16) * 3) % 16}

    def loss(model, batch, keys):
        logits = jax.vmap(model)(batch["x"])
        return meshdp.Mean.of(-jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]])

    step = meshdp.make_train_step(
        loss,
        optax.sgd(0.5),
        mesh=meshdp.make_mesh(data=2, fsdp=4),
        layout=meshdp.fsdp(min_size=64),
    )
    state = step.init(Tied, jax.random.key(0))
    (weight,) = jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array))
    table = np.asarray(weight)

    def plain(table):
        logits = jnp.tanh(table[batch["x"]]) @ table.T
        return -jax.nn.log_softmax(logits)[jnp.arange(16), batch["y"]].mean()

    state, metrics = step(state, batch)
    (weight,) = jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array))
    want = table - 0.5 * jax.grad(plain)(jnp.asarray(table))
    np.testing.assert_allclose(weight, want, rtol=1e-5, atol=1e-6)
    assert weight.sharding.spec in (P("fsdp"), P("fsdp", None))


def test_wrong_options_are_all_named_at_once():
    with pytest.raises(ValueError) as e:
        meshdp.make_train_step(
            lambda *_: None,
            optax.sgd(0.1),
            accumulate=0,
            gather="often",
            precision="bf17",
            remat="some dots?".split()[0:0],
            clip=-1,
            stop_after=0,
        )
    assert str(e.value) == (
        "make_train_step cannot use these arguments:\n"
        "  accumulate: 0; it takes a whole number from 1\n"
        '  gather: \'often\'; it takes "microbatch" or "step"\n'
        "  clip: -1; it takes a number above 0, or None\n"
        "  stop_after: 0; it takes a whole number from 1, or None\n"
        '  precision: \'bf17\'; it takes "full", "bf16", "f16" or a meshdp.Precision\n'
        '  remat: []; it takes "none", "full", "dots", a policy of jax.checkpoint_policies, or '
        "names given to jax.ad_checkpoint.checkpoint_name"
    )
