"""Proof that many devices give one device's numbers, on forced CPU devices if need be."""

import dataclasses
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxapi, _tree
from ._distribute import Distributed
from ._place import place, to_host
from .report import assert_collectives as assert_collectives
from .report import assert_golden as assert_golden
from .train._state import TrainState
from .train._train_step import TrainStep, Updates


def force_devices(n: int) -> None:
    """Makes JAX see `n` CPU devices; for the head of a script or a conftest.

    **Raises:**

    - `RuntimeError`: if JAX has started with other devices, and it is too late.
    - `ValueError`: if `n` is not a whole number from 1.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"force_devices takes a whole number of devices from 1, not {n!r}.")
    if _jaxapi.backend_is_up():
        have = jax.devices()
        if len(have) == n and have[0].platform == "cpu":
            return
        raise RuntimeError(
            f"force_devices({n}) comes too late: JAX has started with {len(have)} "
            f"{have[0].platform} device{'s' if len(have) > 1 else ''}. Call it before anything "
            "asks for devices or makes an array, at the head of the script or conftest.py."
        )
    # XLA's own flag would contradict the setting below.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\S*", "", flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)


@dataclasses.dataclass(frozen=True)
class Parity:
    """What `verify` compared, and how far apart the two runs were."""

    devices: int
    leaves: int
    worst: float
    """The largest difference, relative to the largest number of its leaf."""
    worst_leaf: str

    def __str__(self) -> str:
        if not self.worst:
            return f"{self.leaves} leaves are equal on {self.devices} devices and on one"
        return (
            f"{self.leaves} leaves agree on {self.devices} devices and on one; the largest "
            f"relative difference is {self.worst:.1e}, in {self.worst_leaf}"
        )


@_jaxapi.with_no_mesh_set
def verify(
    step: Distributed, state: Any, batch: Any, *args: Any, rtol: float | None = None
) -> Parity:
    """Runs a step on its mesh and on one device, and compares every leaf.

    For a step of `make_train_step`, the gradients are compared, then the metrics, then the
    update that the optimizer makes of the mesh's own gradients (by itself, because an optimizer
    such as Adam blows the rounding of a vanishing gradient up to a whole update). For a step of
    `distributed`, the one device runs the function as it was written, under plain `jax.jit`,
    with the axes of the mesh all of size 1.

    **Arguments:**

    - `step`: of `distributed` or `make_train_step`.
    - `state`, `batch`, `args`: as for a call. Nothing is donated: the state stays alive. The
        whole of it must fit on one device.
    - `rtol`: the difference allowed, relative to the largest number of a leaf. If `None`, 1e-4
        in float32, 1e-8 in float64, and 8 units of rounding in smaller types: of the leaf's
        type, or of the coarsest that it is computed in (the types of the model and of
        `precision=`; for a step of `distributed`, those of the state and the batch). A leaf
        that is nothing but rounding next to the others of its kind is compared on their scale.

    **Raises:**

    - `AssertionError`: naming the first leaf that differs, by what factor, and how many more.
    """
    if not isinstance(step, Distributed):
        raise TypeError(
            f"verify takes a step made by meshdp.distributed or meshdp.make_train_step, not a "
            f"{type(step).__name__}. Wrap the function: meshdp.distributed(step)."
        )
    shardings = step.shardings(state)  # and so a step without a mesh has chosen one
    # One device with the axes of the mesh, so that bare specs hold there too.
    axes = step.mesh.axis_names
    device = np.reshape(step.mesh.devices.flat[0], (1,) * len(axes))
    one = NamedSharding(_jaxapi.auto_mesh(device, axes), P())
    copy = place(state, shardings)
    if isinstance(step, TrainStep):
        pairs = _train_pairs(step, state, batch, copy, one)
        precision = step.options.precision
        computed = _types(state.model) + (
            [precision.compute, precision.reduce] if precision else []
        )
    else:
        pairs = _plain_pairs(step, state, batch, args, copy, one)
        computed = _types((state, batch))
    return _compare(pairs, step.mesh.devices.size, rtol, computed)


def _whole(tree, one: NamedSharding):
    """The arrays on one device. Numbers stay what the step is compiled for, or weakly typed."""
    arrays, structure = _tree.split(to_host(tree), "state")
    return structure.join(place(arrays, one))


def _plain_pairs(step, state, batch, args, copy, one: NamedSharding):
    arrays, structure = _tree.split(_whole(step.with_arrays(state), one), "state")
    numbers = _tree.is_array_or_number
    given, others = _tree.split(_whole((batch, args), one), "arguments", dynamic=numbers)
    have = step(copy, batch, *args)

    def run(arrays, given):
        batch, args = others.join(given)
        with _jaxapi.tracing_mesh(one.mesh):  # type: ignore[arg-type]
            new = step.__wrapped__(structure.join(arrays), batch, *args)
        out, rest = _tree.split(new, "out", dynamic=numbers)
        return out, _tree.Static(rest)

    out, rest = jax.jit(run)(arrays, given)
    want = rest.value.join(out)
    return [("state", have[0], want[0]), ("aux", have[1], want[1])]


def _train_pairs(step: TrainStep, state: TrainState, batch, copy, one: NamedSharding):
    grads, metrics = step.gradients(state, batch)
    new, _ = step(copy, batch)
    alone = step.elsewhere(one.mesh)
    state1, batch1 = _whole(state, one), to_host(batch)
    given = _whole((grads, new.model_state, metrics), one)
    want, want_metrics = TrainStep(step.options, **alone).gradients(state1, batch1)
    new1, _ = Updates(step.options, **alone)(state1, batch1, *given)
    return [
        ("gradient", grads, want),
        ("metrics", metrics, want_metrics),
        ("state", new, new1),
    ]


def _types(tree) -> list[Any]:
    return [x.dtype for x in _tree.split(tree, "state")[0]]


def _compare(pairs, devices: int, rtol: float | None, computed) -> Parity:
    least = max(map(_rtol, computed), default=0.0)
    problems, count, worst, worst_leaf = [], 0, 0.0, "none"
    for name, have, want in pairs:
        have, want = to_host(have), to_host(want)
        found, other = jtu.tree_leaves_with_path(have), jtu.tree_leaves(want)
        scale = max((_largest(x) for x in other), default=0.0)
        for (path, a), b in zip(found, other, strict=True):
            where = name + jtu.keystr(path)
            if not _tree.is_array_or_number(b):
                if a != b:
                    problems.append(f"  {where}: {a!r} on the mesh, {b!r} on one device")
                continue
            count += 1
            own = _rtol(b.dtype if _tree.is_array(b) else np.dtype(type(b)))
            limit = rtol if rtol is not None else max(own, least) if own else 0.0
            difference, words = _difference(_numbers(a), _numbers(b), scale)
            if not difference <= limit:
                problems.append(f"  {where}: {words}")
            if difference > worst:
                worst, worst_leaf = difference, where
    if problems:
        shown = problems[:8]
        more = len(problems) - len(shown)
        raise AssertionError(
            f"{len(problems)} of {count} leaves differ between {devices} devices and one:\n"
            + "\n".join(shown)
            + (f"\n  and {more} more" if more else "")
        )
    return Parity(devices, count, worst, worst_leaf)


def _numbers(x) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _largest(x) -> float:
    if not _tree.is_array_or_number(x):
        return 0.0
    return float(np.abs(_numbers(x)).max(initial=0.0))


def _rtol(dtype) -> float:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    return 1e-8 if eps < 1e-12 else 1e-4 if eps < 1e-6 else 8 * eps


def _difference(a: np.ndarray, b: np.ndarray, scale: float) -> tuple[float, str]:
    """How far `a` is from `b`, relative to the largest of `b`, and in words."""
    if a.shape != b.shape:
        return np.inf, f"shape {a.shape} on the mesh, {b.shape} on one device"
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf, (
            f"{(~np.isfinite(a)).sum()} numbers are not finite on the mesh, "
            f"{(~np.isfinite(b)).sum()} on one device"
        )
    fine = np.isfinite(b)
    a, b = a[fine], b[fine]
    if not b.size:
        return 0.0, "equal"
    size = max(float(np.abs(b).max()), 1e-6 * scale)
    gap = np.abs(a - b)
    if not gap.max():
        return 0.0, "equal"
    difference = float(gap.max() / size) if size else np.inf
    square = float(np.vdot(b, b).real)
    ratio = float(np.vdot(b, a).real) / square if square else np.inf
    if np.isfinite(ratio) and np.abs(a - ratio * b).max() <= 1e-2 * np.abs(a).max():
        return difference, f"{ratio:.4g} times what one device gives{_guess(ratio)}"
    i = int(gap.argmax())
    return (
        difference,
        f"differs by {gap[i]:.3g}: {a[i]:.6g} on the mesh, {b[i]:.6g} on one device",
    )


def _guess(ratio: float) -> str:
    if ratio > 1.5 and abs(ratio - round(ratio)) < 1e-3 * ratio:
        return ": a sum where a mean was expected?"
    if 0 < ratio < 0.67 and abs(1 / ratio - round(1 / ratio)) < 1e-3 / ratio:
        return ": a mean where a sum was expected?"
    return ""
