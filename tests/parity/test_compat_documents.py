"""The two documents: every listing in both styles, and the faulty ones as they were printed.

The examples compare the styles themselves and fail when they differ.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compat import pmap

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("document_*.py"))
SLOW = ("document_a_five_steps", "document_b_cnn")
PATHS = [
    pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem)
    for p in EXAMPLES
]


@pytest.mark.parametrize("path", PATHS)
def test_both_styles_run_agree_and_learn(path):
    assert len(path.read_text().splitlines()) < 80
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\S+)", done.stdout)] or [1.0, 0.0]
    assert losses[-1] < losses[0] / 5


def test_every_listing_has_its_example():
    assert [p.stem for p in EXAMPLES] == [
        "document_a_five_steps",
        "document_a_train_step",
        "document_b_cnn",
        "document_b_linear_regression",
        "document_b_map",
    ]


# Document A, 2.1, word for word.
def model(params, x):
    return jnp.dot(x, params)


@pmap
def train_step(params, batch):
    def loss_fn(params):
        return jnp.mean((model(params, batch) - batch) ** 2)

    grads = jax.grad(loss_fn)(params)
    return lax.pmean(grads, axis_name="batch")


def said(kind, f, *args):
    with pytest.raises(kind) as e:
        f(*args)
    return str(e.value)


def test_document_a_is_told_that_its_sizes_differ():
    assert said(ValueError, train_step, jnp.ones((100, 100)), jnp.ones((32, 100))) == (
        "pmap maps over dimensions of different sizes: `params` has 100, `batch` has 32; to "
        "broadcast an argument use in_axes=(None, 0)"
    )


def test_document_a_is_told_that_the_axis_has_no_name():
    repaired = pmap(train_step.__wrapped__, in_axes=(None, 0))
    assert said(NameError, repaired, jnp.ones((100, 100)), jnp.ones((8, 4, 100))) == (
        "no pmap in sight has an axis called 'batch'; this pmap was made without axis_name: "
        "write pmap(f, axis_name='batch')"
    )


def test_document_b_is_told_that_parameters_are_no_constants():
    @functools.partial(pmap, axis_name="batch", static_broadcasted_argnums=(0,))
    def distributed_cnn_training(params, batch_images, batch_labels):
        return batch_labels

    params = {"conv1": np.ones((4, 1, 3, 3))}
    assert said(ValueError, distributed_cnn_training, params, np.ones(8), np.ones(8)) == (
        "1 static arguments of pmap cannot be hashed:\n"
        "  `params` is a dict\n"
        "static_broadcasted_argnums is for constants such as functions, strings and flags. To "
        "give every replica the same arrays, take the argument out of "
        "static_broadcasted_argnums and write None for it in in_axes."
    )
