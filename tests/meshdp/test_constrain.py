"""`constrain` means the same model on one device, in both kinds of step and in `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
SPEC = P(("data", "fsdp"), "tensor")


@pytest.fixture(scope="module")
def mesh():
    return meshdp.make_mesh(data=2, fsdp=2, tensor=2)


def model(w, x):
    return jnp.tanh(meshdp.constrain(x @ w, SPEC))


def test_without_a_mesh_it_is_the_identity_and_asks_nothing_of_the_spec():
    x = object()
    assert meshdp.constrain(x, P("no such axis", None, None)) is x
    np.testing.assert_allclose(jax.jit(model)(X, X), np.tanh(X @ X), rtol=1e-5, atol=1e-6)


def test_in_a_step_that_sees_the_whole_batch_it_lays_out_what_it_is_given(mesh):
    step = meshdp.distributed(lambda w, x: (w, {"h": model(w, x)}), mesh=mesh)
    _, aux = step(X, X)
    assert aux["h"].sharding.is_equivalent_to(NamedSharding(mesh, SPEC), 2)
    np.testing.assert_allclose(aux["h"], np.tanh(X @ X), rtol=1e-5, atol=1e-6)


def test_in_a_training_step_the_manual_axes_are_left_out(mesh):
    seen = []

    def loss_fn(w, x, keys):
        seen.append(jax.make_jaxpr(lambda h: meshdp.constrain(h, SPEC))(x @ w))
        return meshdp.Mean.of(model(w, x).sum(-1))

    step = meshdp.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh)
    state, metrics = step(step.init(lambda key: jnp.asarray(X), jax.random.key(0)), X)
    np.testing.assert_allclose(metrics["loss"], np.tanh(X @ X).sum(-1).mean(), rtol=1e-5)
    (constraint,) = [e for e in seen[0].eqns if e.primitive.name == "sharding_constraint"]
    assert constraint.params["sharding"].spec == P(None, "tensor")
    want = X - jax.grad(lambda w: jnp.tanh(X @ w).sum(-1).mean())(X)
    np.testing.assert_allclose(state.model, want, rtol=1e-5, atol=1e-6)


def test_in_a_shard_map_over_everything_it_is_the_identity(mesh):
    def inside(x):
        assert meshdp.constrain(x, SPEC) is x
        return x

    names = mesh.axis_names
    jax.shard_map(inside, mesh=mesh, in_specs=SPEC, out_specs=SPEC, axis_names=set(names))(X)


def test_it_takes_trees_and_leaves_dimensions_to_the_compiler(mesh):
    def body(w, x):
        free = P(P.UNCONSTRAINED, "tensor")
        return w, meshdp.constrain({"a": x, "b": [x + 1]}, free)

    step = meshdp.distributed(body, mesh=mesh)
    _, aux = step(X, X)
    for h in jax.tree.leaves(aux):
        # The rows stay split as they came.
        assert h.addressable_data(0).shape == (2, 4)


def test_it_works_under_vmap_and_grad(mesh):
    def body(w, x):
        row = lambda x: jnp.tanh(meshdp.constrain(x @ w, P("tensor"))).sum()
        return w, jax.grad(lambda x: jax.vmap(row)(x).sum())(x)

    _, grad = meshdp.distributed(body, mesh=mesh)(X, X)
    want = (1 - np.tanh(X @ X) ** 2) @ X.T
    np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-5)


def words(error, body, mesh):
    with pytest.raises(error) as e:
        meshdp.distributed(lambda w, x: (w, body(x)), mesh=mesh)(X, X)
    return str(e.value)


def test_what_is_no_spec_is_refused_even_without_a_mesh():
    with pytest.raises(TypeError) as e:
        meshdp.constrain(X, "tensor")
    assert str(e.value) == (
        "constrain takes a jax.sharding.PartitionSpec, not 'tensor'. Write "
        'meshdp.constrain(x, P(None, "tensor")).'
    )


def test_axes_that_the_mesh_does_not_have_are_named(mesh):
    spec = P(("rows", "data"), "model")
    assert words(ValueError, lambda x: meshdp.constrain(x, spec), mesh) == (
        f"constrain(x, {spec}) names 'model', 'rows', but the mesh has the axes 'data', "
        "'fsdp', 'stage', 'expert', 'seq', 'tensor'."
    )


def test_a_spec_that_is_too_long_is_shown_as_it_was_written(mesh):
    spec = P("data", None, "tensor")
    message = (
        f"constrain(x, {spec}) has 3 entries, but x has shape {{}}. Give one entry for each "
        "dimension; trailing None may be left out."
    )
    assert words(ValueError, lambda x: meshdp.constrain(x, spec), mesh) == message.format(
        "(8, 8)"
    )
    step = meshdp.make_train_step(
        lambda w, x, keys: meshdp.Mean.of(meshdp.constrain(x @ w, spec)),
        optax.sgd(1.0),
        mesh=mesh,
    )
    state = step.init(lambda key: jnp.asarray(X), jax.random.key(0))
    with pytest.raises(ValueError) as e:
        step(state, X)
    assert str(e.value) == message.format("(2, 8)")
