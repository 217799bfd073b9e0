"""A run that is resumed on other devices goes on with the same numbers."""

import shutil

import jax
import numpy as np
import pytest

import meshdp
from meshdp.loop import Batches, fit, reshard

from . import fitting

STEPS, HALF = 8, 4


def run(mesh, steps, tmp_path=None, state=None, losses=None):
    step = fitting.make_step(mesh)
    return fit(
        step,
        fitting.start(step) if state is None else state,
        Batches(fitting.make_data(), 16, seed=2),
        steps=steps,
        checkpoint=tmp_path,
        log=None,
        callbacks=[lambda n, m: losses.append(m["loss"])] if losses is not None else (),
    )


def whole(state):
    return [np.asarray(x) for x in jax.tree.leaves(state) if x.dtype == np.float32]


@pytest.fixture(scope="module")
def uninterrupted():
    """The losses and the parameters of plain JAX on one device, of the same batches."""
    batches = iter(Batches(fitting.make_data(), 16, seed=2))
    return fitting.oracle([next(batches) for _ in range(STEPS)])


def meshes():
    devices = jax.devices()
    return {
        "fsdp_of_8": meshdp.make_mesh(fsdp=8),
        "data_fsdp_tensor": meshdp.make_mesh(data=2, fsdp=2, tensor=2),
        "4": meshdp.make_mesh(data=2, fsdp=2, devices=devices[4:]),
        "2": meshdp.make_mesh(fsdp=2, devices=devices[:2]),
        "1": meshdp.make_mesh(devices=devices[3:4]),
    }


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Half a run on eight devices, replicated, with its checkpoint."""
    at = tmp_path_factory.mktemp("half")
    losses = []
    run(meshdp.make_mesh(data=8), HALF, at, losses=losses)
    return at, losses


@pytest.mark.parametrize("name", meshes())
def test_the_loss_goes_on_as_if_nothing_had_happened(half, uninterrupted, tmp_path, name):
    at, losses = half
    losses = list(losses)
    shutil.copytree(at, tmp_path / "run")
    mesh = meshes()[name]
    out = run(mesh, STEPS, tmp_path / "run", losses=losses)
    model, want = uninterrupted
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for leaf, x in model.items():
        np.testing.assert_allclose(out.state.model[leaf], x, rtol=1e-4, atol=1e-6)
    w = out.state.opt_state[0].mu["w"]
    assert w.sharding.mesh == mesh
    assert w.addressable_data(0).size == w.size // mesh.shape["fsdp"]


def test_resharding_in_a_running_program_does_the_same(uninterrupted):
    losses = []
    first = run(meshdp.make_mesh(data=8), HALF, losses=losses)
    step2 = fitting.make_step(meshes()["4"])
    moved = reshard(first.state, step2)
    assert moved.model["w"].sharding.mesh == meshes()["4"]
    for a, b in zip(whole(moved), whole(first.state), strict=True):
        np.testing.assert_array_equal(a, b)
    batches = iter(Batches(fitting.make_data(), 16, seed=2))
    rest = [next(batches) for _ in range(STEPS)][HALF:]
    for b in rest:
        moved, metrics = step2(moved, b)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, uninterrupted[1], rtol=1e-5)
