"""`python -m meshdp demo`: a byte-level GPT trained on real text, on every device.

Without an accelerator it forces eight CPU devices. The model is `examples/gpt.py`, which is
packed into the wheel. Under two minutes on two cores; the loss on held-out text falls to less
than half.
"""

import argparse
import importlib.util
import math
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _jaxapi
from ._demo_progress import progress
from ._mesh import make_mesh
from ._place import shard_batch, to_host
from .loop import Checkpoints, fit
from .report import Collective, collectives, report, table
from .testing import verify
from .train import make_train_step

AXES = ("data", "fsdp", "tensor")  # those that the demo uses
CPU_DEVICES = 8
MOST_CPU_DEVICES = 256  # beyond, JAX takes minutes to start
STEPS = 120
BATCH = 32  # examples per step (global), or the next number that divides
CONTEXT = 128  # bytes per example
WIDTH = 128
HEADS = 4
PEAK_RATE = 3e-3
HELD_OUT = 128  # examples that measure the loss before and after, or the next number, too
BLOCK = 2**14  # bytes; every tenth block of the text is held out
SAMPLE = 240  # bytes to generate


class Fault(Exception):
    """What is wrong with the user's flags: one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Fault(f"{message}; --help lists the flags")


def main(arguments: Sequence[str]) -> int:
    """Runs the demo and returns the exit status: 0, 2 for a wrong flag, 130 for Ctrl-C."""
    try:
        flags = parse(arguments)
        run(flags)
    except Fault as e:
        print(f"python -m meshdp demo: {e}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C; the demo keeps nothing.", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, checked as far as they can be without devices.

    **Raises:**

    - `Fault`: a flag or a value that cannot be.
    """
    parser = _Parser(
        prog="python -m meshdp demo",
        description="Trains a byte-level GPT on eight devices and proves it right.",
        allow_abbrev=False,
    )
    number = lambda least: lambda text: _number(text, least)
    parser.add_argument(
        "--steps", type=number(1), default=STEPS, metavar="N", help=f"optimizer steps ({STEPS})"
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="AXIS=N,...",
        help="devices along data, fsdp and tensor; -1 once, for all the rest "
        "(data=2,fsdp=2,tensor=2 on eight devices)",
    )
    parser.add_argument(
        "--accumulate", type=number(1), default=2, metavar="N", help="microbatches per step (2)"
    )
    parser.add_argument("--seed", type=number(0), default=0, metavar="N", help="of everything")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="keep checkpoints and a log (log.jsonl) there"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --run"
    )
    parser.add_argument(
        "--text", type=Path, metavar="PATH", help="a file (Python's standard library)"
    )
    parser.add_argument(
        "--report", type=_page, metavar="PATH", help="write the report of the step, as HTML"
    )
    flags = parser.parse_args(arguments)
    if flags.resume and flags.run is None:
        raise Fault("argument --resume: it needs --run DIR, the directory to go on from")
    return flags


def _number(text: str, least: int) -> int:
    if text.isdigit() and len(text) > 18:  # beyond int64 there are no PRNG keys
        raise argparse.ArgumentTypeError(f"{text!r} has more than 18 digits")
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def _page(text: str) -> Path:
    """A file that can be written, found out before training and without touching it."""
    path = Path(text)
    if not text or path.is_dir():
        problem = "is a directory, not a file" if text else "is no file"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no directory {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: Permission denied"
    else:
        return path
    raise argparse.ArgumentTypeError(f"{text!r} {problem}")


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        good = size == "-1" or (size.isascii() and size.isdigit() and int(size) > 0)
        if axis not in AXES or not good or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r}; it takes {', '.join(AXES)}, each once and with a "
                "number of devices, such as data=4,fsdp=2"
            )
        sizes[axis] = int(size)
    return sizes


def run(flags: argparse.Namespace) -> None:
    """Trains, measures, generates, verifies and reports, with a line for each."""
    train, held_out, source = load_text(flags.text)
    checkpoints = open_run(flags)
    mesh = open_mesh(flags.mesh)
    try:
        if checkpoints is not None:
            checkpoints.claim()
    except OSError as e:
        raise Fault(f"argument --run: {str(e).rstrip('.')}") from None
    gpt = load_model()
    sizes = {axis: mesh.shape[axis] for axis in AXES}
    for axis in ("fsdp", "tensor"):
        if WIDTH % sizes[axis]:
            raise Fault(
                f"argument --mesh: {axis}={sizes[axis]} does not divide the model's width of "
                f"{WIDTH}"
            )
    heads = max(HEADS, sizes["tensor"])
    share = sizes["data"] * sizes["fsdp"] * flags.accumulate
    batch = math.ceil(BATCH / share) * share

    rate = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_RATE, min(20, flags.steps // 5), flags.steps, PEAK_RATE / 10
    )
    step = make_train_step(
        gpt.loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95)),
        mesh=mesh,
        layout=gpt.LAYOUT,
        accumulate=flags.accumulate,
    )
    make_model = partial(gpt.GPT, width=WIDTH, heads=heads, context=CONTEXT)
    state = step.init(make_model, jax.random.key(flags.seed))
    device = mesh.devices.flat[0]
    used = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
    size = sum(x.size for x in jax.tree.leaves(state.model))
    print(f"text: {source}, one block in ten held out")
    print(f"model: {size:,} parameters; {batch} x {CONTEXT} bytes a step (global)")
    print(f"mesh: {used}, {mesh.devices.size} {device.platform} devices; ", end="")
    print(f"accumulate={flags.accumulate}, JAX {_jaxapi.VERSION}", flush=True)

    ways = sizes["data"] * sizes["fsdp"]
    exam = next(batches(held_out, flags.seed, math.ceil(HELD_OUT / ways) * ways))
    before = evaluate(gpt.loss_fn, state.model, exam, mesh)
    print(f"held-out loss: {before:.3f} before", flush=True)

    stream = batches(train, flags.seed, batch)
    example = next(stream)
    done = checkpoints.steps()[-1] if checkpoints and checkpoints.steps() else 0
    if done:
        print(f"resumed from the checkpoint of step {done} in {flags.run}", flush=True)
    with progress(flags.steps, batch * CONTEXT, done) as advance:
        state = fit(
            step,
            state,
            stream,
            steps=flags.steps,
            checkpoint=checkpoints,
            log=flags.run and flags.run / "log.jsonl",
            callbacks=[lambda _, metrics: advance(metrics["loss"])],
            config=flags,
        ).state

    after = evaluate(gpt.loss_fn, state.model, exam, mesh)
    print(f"held-out loss: {after:.3f} after, {after / before:.0%} of what it was", flush=True)
    print("sample:")
    for line in generate(state.model, exam[0, :CONTEXT], flags.seed).splitlines():
        print(f"  | {line}", flush=True)
    print(f"parity: {verify(step, state, example)}", flush=True)
    if flags.report is None:
        found = collectives(step.lower(state, example).compile(), mesh)
    else:
        found = write_report(step, state, example, flags.report)
    print("collectives of one step:")
    print(table(found), flush=True)


def write_report(step: Any, state: Any, batch: Any, path: Path) -> Sequence[Collective]:
    """Writes the report of the step as HTML; its collectives.

    **Raises:**

    - `Fault`: the file cannot be written after all, as on a full disk.
    """
    made = report(step, state, batch)
    try:
        made.to_html(path)
    except OSError as e:
        raise Fault(f"argument --report: {path} cannot be written: {e.strerror}") from None
    print(f"report: {path}", flush=True)
    return made.collectives


def open_run(flags: argparse.Namespace) -> Checkpoints | None:
    """The checkpoints of the run to begin or to go on with.

    **Raises:**

    - `Fault`: the directory has a run and `--resume` was not given; orbax is missing.
    """
    if flags.run is None:
        return None
    try:
        checkpoints = Checkpoints(flags.run / "checkpoints", every=max(1, flags.steps // 6))
    except ImportError as e:
        raise Fault(f"argument --run: {e}") from None
    done = checkpoints.steps()
    if done and not flags.resume:
        raise Fault(
            f"argument --run: {flags.run} has a run that came to step {done[-1]}; "
            "go on with --resume, or choose another directory"
        )
    return checkpoints


def open_mesh(sizes: dict[str, int] | None) -> jax.sharding.Mesh:
    """The mesh asked for; without accelerators, on as many CPU devices as it takes.

    **Raises:**

    - `Fault`: the sizes do not fit the devices that there are.
    """
    asked: dict[str, Any] = dict(sizes or {"data": -1})
    count = math.prod(asked.values())
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced and not _jaxapi.backend_is_up():
        # Says nothing about other platforms: where there are accelerators, they are used.
        number = CPU_DEVICES if count < 0 else min(count, MOST_CPU_DEVICES)
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices()
    if devices[0].platform != "cpu":
        # Their default precision would differ more between layouts than the proof allows.
        jax.config.update("jax_default_matmul_precision", "highest")
    if sizes is None:
        n = len(devices)
        tensor, fsdp = (2 if n % 2 == 0 else 1), (2 if n % 4 == 0 else 1)
        asked = {"data": -1, "fsdp": fsdp, "tensor": tensor}
    try:
        return make_mesh(**asked)
    except ValueError as e:
        raise Fault(f"argument --mesh: {str(e).rstrip('.')}") from None


def load_model() -> types.ModuleType:
    """`examples/gpt.py`, from the wheel or from the source tree."""
    here = Path(__file__).parent
    places = [here / "_examples" / "gpt.py", here.parent / "examples" / "gpt.py"]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        raise Fault(f"the model is missing: neither {places[0]} nor {places[1]} exists")
    spec = importlib.util.spec_from_file_location("meshdp._examples_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_text(path: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Bytes to train on, bytes held out, and what they are.

    By default the modules at the top of the running Python's standard library, by name.

    **Raises:**

    - `Fault`: the file cannot be read, or is too short.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = b"\n".join(f.read_bytes() for f in files)
        version = ".".join(map(str, sys.version_info[:2]))
        source = f"{len(files)} modules of Python {version}'s standard library"
    else:
        try:
            data = path.read_bytes()
        except OSError as e:
            raise Fault(f"argument --text: {path} cannot be read: {e.strerror}") from None
        source = str(path)
    block = min(BLOCK, len(data) // 10)
    if block <= CONTEXT:
        raise Fault(
            f"argument --text: {source} has {len(data)} bytes; it takes at least "
            f"{10 * (CONTEXT + 1)}"
        )
    blocks = np.frombuffer(data, np.uint8)[: len(data) // block * block].reshape(-1, block)
    held_out = np.arange(len(blocks)) % 10 == 9
    source = f"{source}, {len(data) / 1e6:.1f} MB"
    return blocks[~held_out].ravel(), blocks[held_out].ravel(), source


def batches(text: np.ndarray, seed: int, size: int) -> Iterator[np.ndarray]:
    """Endless batches `[size, CONTEXT + 1]` (global) of windows from anywhere in the text."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT, size)
        yield text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def evaluate(loss_fn: Any, model: Any, tokens: np.ndarray, mesh: Any) -> float:
    """The mean loss of a batch, without dropout."""

    @eqx.filter_jit
    def mean(model, tokens):
        return loss_fn(model, tokens, None).value()

    return float(mean(model, shard_batch(tokens, mesh)))


def generate(model: Any, prompt: np.ndarray, seed: int) -> str:
    """Continues a prompt of `CONTEXT` bytes, on one device; as text that can be printed."""
    model = to_host(model)

    @eqx.filter_jit
    def continued(model, prompt, key):
        def byte(window, key):
            logits = model(window[None])[0, -1]
            new = jax.random.categorical(key, logits / 0.8).astype(window.dtype)
            return jnp.append(window[1:], new), new

        return jax.lax.scan(byte, prompt, jax.random.split(key, SAMPLE))[1]

    new = np.asarray(continued(model, jnp.asarray(prompt), jax.random.key(seed)), np.uint8)
    text = new.tobytes().decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c == "\n" else "." for c in text)
