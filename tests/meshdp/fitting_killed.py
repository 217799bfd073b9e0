"""Kills training processes at random moments and starts them again; run by test_fit_killed.py.

Arguments: a directory and a seed. Each training process is forked from this one, which has
imported everything but started no backend, so that twenty of them take half a minute.
"""

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import fitting
import jax
import numpy as np
import optax

import meshdp
from meshdp.loop import Batches, Checkpoints, fit
from meshdp.loop._restore import orbax

KILLS, EVERY = 20, 5
directory, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", str(directory / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
orbax()


def train(at, steps, pipe):
    """One training process: tells each step through the pipe and saves the final model."""
    step = meshdp.make_train_step(
        fitting.loss_fn,
        optax.adam(1e-2),
        mesh=meshdp.make_mesh(data=2, fsdp=2),
        layout=meshdp.fsdp(min_size=1),
    )
    out = fit(
        step,
        fitting.start(step),
        Batches(fitting.make_data(), 16, seed=7),
        steps=steps,
        checkpoint=Checkpoints(at, every=EVERY, keep=2),
        log=lambda r: os.write(pipe, b"s%d\n" % r["step"]) if r["event"] == "start" else None,
        callbacks=[lambda n, m: os.write(pipe, b"t%d\n" % n) and None],
    )
    leaves = [x for x in jax.tree.leaves(out.state) if x.dtype == np.float32]
    np.savez(f"{at}.npz", *map(np.asarray, leaves))


def fork(at, steps):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            train(at, steps, writer)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    return pid, reader


def wait_for(reader, token, seconds):
    """Reads what the process tells until it says `token`."""
    said, end = b"", time.monotonic() + seconds
    while token not in said and time.monotonic() < end:
        if select.select([reader], [], [], 0.05)[0]:
            more = os.read(reader, 2**16)
            if not more:
                break
            said += more
    return said


def finish(at, steps):
    pid, reader = fork(at, steps)
    wait_for(reader, b"never", 100)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


reached, halfway, torn = 0, [], 0
for i in range(KILLS):
    pid, reader = fork(directory / "killed", 10**6)
    if i % 5 == 4:  # while it starts, restores or compiles
        time.sleep(rng.uniform(0.0, 0.8))
        said = b""
    else:
        said = wait_for(reader, b"t", 60)
        time.sleep(rng.uniform(0.0, 0.6))
    os.kill(pid, signal.SIGKILL)
    said += wait_for(reader, b"never", 10)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(reader)
    # Of a process that was killed; set aside by the one that resumed after it.
    torn += any((directory / "killed").glob("*-tmp"))
    words = said.decode().split()
    started = [int(w[1:]) for w in words if w[0] == "s"]
    if started:
        # Lost: the steps since the last save, and that save if it was not written yet.
        assert started[0] >= reached - 2 * EVERY, (started, reached)
        reached = max([started[0], *(int(w[1:]) for w in words if w[0] == "t")])
        halfway.append(started[0])
target = reached + 10
finish(directory / "killed", target)
finish(directory / "whole", target)
with np.load(directory / "killed.npz") as a, np.load(directory / "whole.npz") as b:
    same = all(a[k].tobytes() == b[k].tobytes() for k in b.files)
print(f"kills {KILLS} torn {torn} resumed {len(set(halfway))} steps {target} same {same}")
