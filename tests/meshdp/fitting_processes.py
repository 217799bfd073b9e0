"""Trains on all processes and devices there are; run by test_fit_processes.py.

Arguments: directory, steps, and at which step process 1 kills itself the first time (0: never).
"""

import json
import os
import signal
import sys
from pathlib import Path

import fitting
import jax
import numpy as np
import optax

import meshdp
from meshdp._place import to_host
from meshdp.loop import Batches, Checkpoints, Evaluation, fit

directory, steps, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
died = directory / "died"


def die(step, metrics):
    if step == dies_at and jax.process_index() == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Read:
    """The examples, telling which were read by this process."""

    def __init__(self):
        self.data, self.read = fitting.make_data(), []

    def __len__(self):
        return fitting.EXAMPLES

    def __getitem__(self, i):
        self.read.append(i)
        return {k: x[i] for k, x in self.data.items()}


mesh = meshdp.make_mesh(data=2, fsdp=4)
step = meshdp.make_train_step(
    fitting.loss_fn, optax.adam(1e-2), mesh=mesh, layout=meshdp.fsdp(min_size=1)
)
examples = Read()
out = fit(
    step,
    fitting.start(step),
    Batches(examples, 16, seed=2),
    steps=steps,
    checkpoint=Checkpoints(directory / "run", every=3),
    evaluate=Evaluation(fitting.loss_fn, Batches(fitting.make_data(50), 16, epochs=1)),
    evaluate_every=4,
    log=["console", directory / "log.jsonl"],
    log_every=1,
    callbacks=[die],
)
model = {k: np.asarray(x).tolist() for k, x in to_host(out.state.model).items()}
print(json.dumps({"model": model, "evaluation": out.evaluation, "read": examples.read[:8]}))
