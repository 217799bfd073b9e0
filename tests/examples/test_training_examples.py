"""The training examples run as they stand, learn what they promise and show their traffic."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def run(name, *flags, cwd=None):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *flags],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def losses(text):
    return [float(x) for x in re.findall(r"^step .*loss (\S+)", text, re.M)]


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--pmap",), marks=pytest.mark.slow)], ids=["mesh", "pmap"]
)
def test_linear_regression_finds_least_squares(flags):
    out = run("linear_regression.py", *flags)
    (best,) = map(float, re.findall(r"^least squares  loss (\S+)$", out, re.M))
    assert losses(out)[0] > 100 * best and losses(out)[-1] == best
    assert float(re.search(r"at most (\S+)$", out.strip())[1]) < 1e-3
    assert re.search(r"^(data|device) +all-reduce +1 +7[26] B", out, re.M), out


@pytest.mark.parametrize(
    "pmap", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["mesh", "pmap"]
)
def test_the_digits_cnn_reads_97_percent_of_held_out_digits(load, capsys, pmap):
    load("digits_cnn").main(pmap)
    out = capsys.readouterr().out
    (right,) = map(float, re.findall(r"^(\S+) % of 360 held-out digits are read", out, re.M))
    assert right >= 97
    assert re.search(r"^(data|device) +all-reduce ", out, re.M), out


def test_the_digits_cnn_never_trains_on_what_it_holds_out(load, monkeypatch):
    cnn, seen = load("digits_cnn"), []
    data = {"x": np.arange(1797, dtype=np.float32)[:, None, None, None], "y": np.zeros(1797)}
    data["x"] = np.broadcast_to(data["x"], (1797, 1, 8, 8))

    class Step:
        def lower(self, *_):
            return self

        compile = lower

        def __call__(self, state, batch):
            seen.append(batch["x"][:, 0, 0, 0])
            return state, {"loss": 0.0}

    class State:
        model = cnn.CNN(jax.random.key(0))

    monkeypatch.setattr(cnn, "load", lambda: data)
    monkeypatch.setattr(cnn, "start", lambda *_: (Step(), State(), {}))
    monkeypatch.setattr(cnn, "collectives", lambda *_: ())
    cnn.main()
    once = np.concatenate(seen[:22])
    assert len(set(once)) == len(once) and min(map(min, seen)) == cnn.TEST


def test_resnet_50_has_the_parameters_of_resnet_50(load):
    made = eqx.nn.make_with_state(load("resnet").ResNet)
    model, state = eqx.filter_eval_shape(made, "batch", jax.random.key(0))
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    assert sum(x.size for x in filter(is_shape, jax.tree.leaves(model))) == 25_557_032
    convs = [x for x in filter(is_shape, jax.tree.leaves(model)) if x.ndim == 4]
    assert len(convs) == 53
    images = jax.ShapeDtypeStruct((2, 3, 224, 224), np.float32)
    apply = jax.vmap(
        lambda m, x, s: m(x, s), axis_name="batch", in_axes=(None, 0, None), out_axes=(0, None)
    )
    logits, after = eqx.filter_eval_shape(apply, model, images, state)
    assert logits.shape == (2, 1000)
    # Mean and variance of every channel that is normalised: those of torchvision's resnet50.
    assert sum(x.size for x in jax.tree.leaves(after) if x.ndim) == 53_120


@pytest.mark.slow
def test_resnet_50_learns_in_few_steps():
    out = run("resnet50.py", "--steps", "8")
    assert out.startswith("25,557,032 parameters, 8 devices\n")
    assert losses(out)[0] > 6.5 and min(losses(out)[-2:]) < 2.0
    assert re.search(r"^data +reduce-scatter +\d+ +102 MB", out, re.M), out


@pytest.mark.slow
def test_growing_agrees_at_each_size_and_shows_what_it_costs(tmp_path):
    out = run("growing.py", "--plot", "here.png", cwd=tmp_path)
    rows = np.array([row.split() for row in out.splitlines()[1:5]], float)
    assert rows[:, 0].tolist() == [1, 2, 4, 8]
    np.testing.assert_allclose(rows[:, 1], rows[0, 1], rtol=1e-3)
    memory, sent = rows[:, 3], rows[:, 4]
    assert (np.diff(memory) < 0).all() and (np.diff(sent) > 0).all() and sent[0] == 0
    assert out.splitlines()[5:] == [
        "each size gave the weights of the one before",
        "plotted in here.png",
    ]
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


def test_growing_stops_where_a_size_gives_other_weights(load, monkeypatch):
    growing = load("growing")
    weights = lambda devices, axis: {"w": np.full(3, len(devices) ** 0.5)}
    row = lambda *given: (weights(*given), 1.0, (1.0, 1.0, 0.0))
    monkeypatch.setattr(growing, "train", row)
    with pytest.raises(AssertionError, match="Max absolute difference"):
        growing.main("--axis", "data")
