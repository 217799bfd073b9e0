"""`distributed`: the numbers of one device, laid out as asked, on a mesh of one's choice."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import _jaxapi

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def descend(w, x):
    """One step of gradient descent: the mean over the batch couples all of its rows."""
    loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
    return w - 0.1 * grad, loss


def one_device(w, x, steps=1):
    for _ in range(steps):
        w, loss = jax.jit(descend)(jnp.asarray(w), jnp.asarray(x))
    return np.asarray(w), np.asarray(loss)


def weights(rows=4, columns=8):
    return np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(rows, columns)


@pytest.fixture
def counted_keywords():
    seen = []

    def step(w, x, scale, *, rate, mode, shift=None):
        seen.append("without" if shift is None else "with")
        w = w * scale - rate
        return (w if shift is None else w + shift[None]), {"mode": mode}

    return meshdp.distributed(step, mesh=meshdp.make_mesh(data=8)), seen


MESHES = {
    "data": dict(data=8),
    "fsdp": dict(fsdp=8),
    "data_fsdp_tensor": dict(data=2, fsdp=2, tensor=2),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_step_gives_the_numbers_of_one_device_and_lies_as_asked(name):
    sizes = MESHES[name]
    layout = meshdp.by_path({"": P(None, ("tensor", "fsdp"))})
    step = meshdp.distributed(descend, mesh=meshdp.make_mesh(**sizes), layout=layout)
    w, loss = step(weights(), X)
    w, loss = step(w, X)
    want, want_loss = one_device(weights(), X, steps=2)
    np.testing.assert_allclose(w, want, rtol=1e-5)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    share = 8 // (sizes.get("fsdp", 1) * sizes.get("tensor", 1))
    assert {s.data.shape for s in w.addressable_shards} == {(4, share)}


def test_bare_it_takes_all_devices_for_data_and_logs_why(caplog, monkeypatch):
    monkeypatch.setattr(_jaxapi, "memory_limit", lambda device: 2_000_000)

    @meshdp.distributed
    def train(w, x):
        return descend(w, x)

    with caplog.at_level(logging.INFO, "meshdp"):
        w, _ = train(weights(), X)
        w, _ = train(w, X)
    np.testing.assert_allclose(w, one_device(weights(), X, steps=2)[0], rtol=1e-5)
    assert dict(train.mesh.shape)["data"] == 8
    assert [r.getMessage() for r in caplog.records] == [
        (
            "test_bare_it_takes_all_devices_for_data_and_logs_why.<locals>.train: all 8 "
            "devices on 'data', since twice the state (256 bytes) fits in the memory of one "
            "device (2 MB); give mesh= to choose."
        )
    ]


def test_bare_it_takes_all_devices_for_fsdp_where_the_state_does_not_fit(caplog, monkeypatch):
    monkeypatch.setattr(_jaxapi, "memory_limit", lambda device: 1_000_000)
    step = meshdp.distributed(lambda w, x: (w + x.mean(), None))
    with caplog.at_level(logging.INFO, "meshdp"):
        w = step.init(lambda: jnp.zeros((512, 256)))
    assert dict(step.mesh.shape)["fsdp"] == 8
    assert w.addressable_data(0).shape == (64, 256)
    assert (
        caplog.records[0]
        .getMessage()
        .endswith(
            "all 8 devices on 'fsdp', since twice the state (1.05 MB) does not fit in the "
            "memory of one device (1 MB); give mesh= to choose."
        )
    )


def test_with_options_it_decorates_too_and_keeps_the_name_and_the_function():
    mesh = meshdp.make_mesh(data=8)

    @meshdp.distributed(mesh=mesh, donate=False)
    def train(w, x):
        """Trains."""
        return descend(w, x)

    assert train.__name__ == "train"
    assert train.__doc__ == "Trains."
    assert train.mesh is mesh
    np.testing.assert_allclose(
        train.__wrapped__(weights(), X)[0], one_device(weights(), X)[0], rtol=1e-6
    )


def test_a_callable_object_is_a_step_and_its_attributes_do_not_shadow_ours():
    class Step:
        init = mesh = "mine"

        def __init__(self):
            self.lower = "mine"

        def __call__(self, w, x):
            return descend(w, x)

    step = meshdp.distributed(Step(), mesh=meshdp.make_mesh(data=8))
    step.lower(weights(), X)
    np.testing.assert_allclose(step(weights(), X)[0], one_device(weights(), X)[0], rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_a_mesh_with_axes_of_ones_own_will_do_explicit_or_not(kind):
    own = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "cols"), axis_types=(kind,) * 2)
    layout = meshdp.by_path({"": P(None, "cols")})
    step = meshdp.distributed(descend, mesh=own, layout=layout, batch=P("rows"))
    w, _ = step(weights(), X)
    np.testing.assert_allclose(w, one_device(weights(), X)[0], rtol=1e-5)
    assert w.addressable_data(0).shape == (4, 4)


def test_without_a_layout_a_mesh_without_fsdp_replicates():
    own = Mesh(np.array(jax.devices()), ("rows",), axis_types=(AxisType.Auto,))
    step = meshdp.distributed(descend, mesh=own, batch=P("rows"))
    w, _ = step(np.zeros((512, 256), np.float32), np.ones((8, 512), np.float32))
    assert w.addressable_data(0).shape == (512, 256)


def test_the_batch_may_be_split_over_further_dimensions():
    mesh = meshdp.make_mesh(data=4, tensor=2)

    @meshdp.distributed(mesh=mesh, batch=P("data", "tensor"))
    def step(w, batch):
        return w, jnp.stack([batch["x"].sum(), batch["scale"].sum(), batch["one"]])

    seen = (
        step.lower(0 * weights(), {"x": X, "scale": X[:, 0], "one": np.float32(1)})
        .compile()
        .input_shardings[0]
    )
    assert seen[1][2].spec == P("data", "tensor")  # x
    assert seen[1][1].spec == P("data")  # scale
    _, sums = step(0 * weights(), {"x": X, "scale": X[:, 0], "one": np.float32(1)})
    np.testing.assert_allclose(sums, [X.sum(), X[:, 0].sum(), 1], atol=1e-5)


def test_batches_of_other_shapes_follow_each_other_through_one_step():
    step = meshdp.distributed(descend, mesh=meshdp.make_mesh(data=8))
    w = want = weights()
    for rows in (16, 16, 8, 16):
        w, _ = step(w, X[:rows])
        want, _ = one_device(want, X[:rows])
    np.testing.assert_allclose(w, want, rtol=1e-5)


def test_states_of_other_shapes_are_laid_out_anew_by_the_same_step():
    mesh = meshdp.make_mesh(fsdp=8)
    step = meshdp.distributed(descend, mesh=mesh, layout=meshdp.fsdp(min_size=32))
    # 8 devices divide the columns of the first, and only the rows of the second.
    wide, _ = step(weights(4, 8), X)
    tall, _ = step(weights(16, 2), np.repeat(X, 4, axis=1))
    wide, _ = step(wide, X)
    assert wide.addressable_data(0).shape == (4, 1)
    assert tall.addressable_data(0).shape == (2, 2)
    np.testing.assert_allclose(wide, one_device(weights(4, 8), X, steps=2)[0], rtol=1e-5)
    lowered = step.lower(weights(16, 2), np.repeat(X, 4, axis=1)).compile()
    assert lowered.input_shardings[0][0][0].spec == P("fsdp")


def test_further_arguments_may_be_keys_numbers_and_trees():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, x, key, rate, more):
        noise = jax.random.normal(key, w.shape)
        return w - rate * noise * more["scale"], jax.random.key_data(key)

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        w, data = step(weights(), X, key, 0.5, {"scale": np.float32(2), "unused": None})
        noise = jax.random.normal(key, (4, 8))
        np.testing.assert_allclose(w, weights() - noise, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_arguments_by_name_are_traced_and_arrive_by_name(counted_keywords):
    step, seen = counted_keywords
    ones = np.ones((4, 8), np.float32)
    for rate, scale in [(0.5, 2), (0.25, 3)]:
        for shift in (jnp.ones(8), None):
            w, aux = step(ones, X, scale, shift=shift, rate=rate, mode="sum")
            np.testing.assert_array_equal(w, scale - rate + (shift is not None) * ones)
            assert aux == {"mode": "sum"}
    assert seen == ["with", "without"]
    step.lower(weights(), X, 1, rate=0.1, mode="sum")
    assert len(seen) == 3  # a number in place of a default is another program


def test_an_unknown_name_is_pythons_error():
    step = meshdp.distributed(descend, mesh=meshdp.make_mesh(data=8))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rat'"):
        step(weights(), X, rat=0.1)


def test_a_python_number_keeps_the_dtype_of_what_it_meets_as_on_one_device():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, batch, rate):
        return w * rate, batch["temperature"] * w

    w, aux = step(jnp.ones(4, jnp.bfloat16), {"x": X, "temperature": 2.0}, 0.5)
    assert (w.dtype, aux.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_a_number_inside_a_batch_that_is_a_module_arrives():
    class Batch(eqx.Module):
        x: np.ndarray
        scale: float

    step = meshdp.distributed(
        lambda w, b: (w, b.x.mean() * b.scale), mesh=meshdp.make_mesh(data=8)
    )
    for scale in (2.0, 3.0):
        _, aux = step(weights(), Batch(X + 1, scale))
        np.testing.assert_allclose(aux, (X + 1).mean() * scale, rtol=1e-5)


def test_aux_may_hold_anything():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, x):
        aux = {
            "loss": x.mean(),
            "name": "mean",
            "none": None,
            "f": jnp.tanh,
            "n": 3,
            "ok": True,
        }
        return w, (aux, [])

    _, (aux, empty) = step(weights(), X)
    assert empty == []
    assert (aux["name"], aux["none"], aux["f"], aux["ok"]) == ("mean", None, jnp.tanh, True)
    assert int(aux["n"]) == 3
    np.testing.assert_allclose(aux["loss"], X.mean(), atol=1e-6)


def test_a_state_that_is_also_returned_as_aux_outlives_the_next_step():
    def both(w, x):
        w, _ = descend(w, x)
        return w, w

    step = meshdp.distributed(both, mesh=meshdp.make_mesh(data=8))
    w, first = step(weights(), X)
    step(w, X)
    np.testing.assert_allclose(first, one_device(weights(), X)[0], rtol=1e-5)


def test_a_state_may_hold_modules_with_functions_flags_and_numbers():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        activation: object

    def make(key):
        return Model(eqx.nn.Linear(4, 8, key=key), eqx.nn.Dropout(0.5), jax.nn.relu)

    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(state, x):
        out = jax.vmap(lambda x: state["model"].activation(state["model"].linear(x)))(x)
        return {**state, "count": state["count"] + 1}, (out * state["temperature"]).mean()

    state = {"model": make(jax.random.key(0)), "count": jnp.int32(0), "temperature": 0.5}
    model = state["model"]
    want = jax.nn.relu(X @ model.linear.weight.T + model.linear.bias[None]).mean() * 0.5
    for _ in range(2):
        state, loss = step(state, X)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert (int(state["count"]), state["temperature"]) == (2, 0.5)
    assert state["model"].activation is jax.nn.relu


def test_a_state_class_may_call_its_field_whatever_it_likes():
    class State(eqx.Module):
        _flat: jax.Array

    step = meshdp.distributed(
        lambda s, x: (State(s._flat + 1), None), mesh=meshdp.make_mesh(data=8)
    )
    state, _ = step(State(jnp.zeros(3)), X)
    np.testing.assert_array_equal(state._flat, np.ones(3))


def test_a_bare_spec_inside_the_step_means_its_mesh():
    mesh = meshdp.make_mesh(data=4, tensor=2)

    @meshdp.distributed(mesh=mesh)
    def step(w, x):
        h = jax.lax.with_sharding_constraint(x @ w, P("data", "tensor"))
        return w, jnp.tanh(h)

    w, h = step(weights(), X)
    assert h.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "tensor")), 2)
    np.testing.assert_allclose(h, np.tanh(X @ weights()), rtol=1e-5)


class TestInit:
    """`.init(make_state, *args)`."""

    @staticmethod
    def step(**sizes):
        layout = meshdp.fsdp(min_size=64)
        return meshdp.distributed(descend, mesh=meshdp.make_mesh(**sizes), layout=layout)

    def test_the_state_is_that_of_one_device_and_no_device_ever_holds_it_whole(self):
        step = self.step(fsdp=8)
        make = lambda key, n, scale: {
            "w": scale * jax.random.normal(key, (n, 32)),
            "name": "w",
            "f": jnp.tanh,
            "key": jax.random.fold_in(key, 1),
        }
        state = step.init(make, jax.random.key(1), 16, 0.5)
        want = make(jax.random.key(1), 16, 0.5)
        assert {s.data.shape for s in state["w"].addressable_shards} == {(16, 4)}
        np.testing.assert_allclose(state["w"], want["w"], rtol=1e-6)
        assert (state["name"], state["f"]) == ("w", jnp.tanh)
        assert jnp.array_equal(
            jax.random.key_data(state["key"]), jax.random.key_data(want["key"])
        )
        assert state["key"].sharding.is_equivalent_to(NamedSharding(step.mesh, P()), 0)

    def test_the_program_that_makes_it_has_room_for_a_share_only(self, monkeypatch):
        programs = []
        lower = jax.jit

        def watched(f, **options):
            jitted = lower(f, **options)
            programs.append(jitted)
            return jitted

        monkeypatch.setattr(jax, "jit", watched)
        step = self.step(fsdp=8)
        step.init(lambda: jnp.ones((256, 256)))
        memory = programs[-1].lower([]).compile().memory_analysis()
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 256 * 256 * 4 / 4

    def test_the_callers_key_stays_alive(self):
        key = jax.random.key(0)
        self.step(data=8).init(lambda k: jax.random.normal(k, (4, 8)), key)
        assert not key.is_deleted()

    def test_a_step_needs_no_move_after_it(self):
        step = self.step(fsdp=8)
        state = step.init(lambda: jnp.ones((8, 32)))
        step(state, np.ones((8, 8), np.float32))
        assert state.is_deleted()  # donated, so not copied
