"""The GPT of the example on meshes that combine axes: one loss, each axis its own traffic."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hybrid_gpt.py"
MESHES = ["data=2,stage=2,tensor=2", "data=2,fsdp=2,seq=2", "data=2,expert=4"]

# Compiles the example's step for 64 devices and prints which collectives each axis has.
COMPILE = """
import runpy, sys
import jax, numpy as np
from meshdp.testing import force_devices
force_devices(64)
import meshdp
from meshdp.report._hlo import collectives
example = runpy.run_path(sys.argv[1])
mesh = meshdp.make_mesh(data=2, fsdp=2, stage=2, expert=2, seq=2, tensor=2)
step = example["make_step"](mesh)
state = step.init(example["make_model"], jax.random.key(0))
batch = {n: np.zeros((example["BATCH"], example["TOKENS"]), np.int32) for n in "xy"}
for c in collectives(step.lower(state, batch).compile(), mesh):
    print(*c.axes, c.kind)
"""


def run(mesh):
    return subprocess.run(
        [sys.executable, str(EXAMPLE), "--mesh", mesh], capture_output=True, text=True, cwd=ROOT
    )


def losses(mesh):
    done = run(mesh)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_the_example_prints_the_same_losses_on_every_mesh_and_learns():
    one = losses("data=1")
    assert one[-1] < one[0] - 1
    for mesh in MESHES:
        assert losses(mesh) == pytest.approx(one, rel=1e-4), mesh


@pytest.mark.slow
def test_on_64_devices_each_axis_has_the_collectives_that_it_is_for():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(EXAMPLE)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.splitlines())
    assert "stage collective-permute" in found
    assert "seq collective-permute" in found
    assert "expert all-to-all" in found
    assert "tensor all-reduce" in found
    assert any(re.fullmatch(r".*fsdp.* (all-gather|reduce-scatter)", line) for line in found)
    assert any(re.fullmatch(r"data.* (all-reduce|reduce-scatter)", line) for line in found)
    # Only what belongs to its axis travels around it.
    assert not any(re.fullmatch(r"tensor (collective-permute|all-to-all)", x) for x in found)
    assert not any(re.fullmatch(r"stage all-to-all", x) for x in found)


@pytest.mark.parametrize(
    "mesh, words",
    [
        (
            "datta=2",
            """'datta=2'; it takes data, fsdp, stage, expert, seq, tensor, each at most once,
            with a number of devices, of which there are 64 at most""",
        ),
        (
            "expert=3",
            """2 faults in the layout on a mesh of expert=3: .model['layers']['grow']: P(None,
            'expert') splits dimension 1 of shape (4, 4, 32, 128) over expert=3, but 4 % 3 = 1.
            Pad it to 6, split another dimension, or replicate the leaf.
            .model['layers']['shrink']: P(None, 'expert') splits dimension 1 of shape (4, 4,
            128, 32) over expert=3, but 4 % 3 = 1. Pad it to 6, split another dimension, or
            replicate the leaf.""",
        ),
    ],
)
def test_the_example_says_what_is_wrong_with_a_mesh(mesh, words):
    done = run(mesh)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert said.endswith(f"error: argument --mesh: {' '.join(words.split())}")
