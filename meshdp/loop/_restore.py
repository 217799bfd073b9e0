"""Reading a checkpoint into a state of any layout, and telling what is wrong with it."""

import contextlib
import dataclasses
import gc
import itertools
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import _jaxapi, _place, _tree
from . import _files
from ._checksum import checksums
from ._compare import compare, leaf, read_described

log = logging.getLogger("meshdp")

PATIENCE = 1800.0
"""Seconds that a process waits for the others to have read their parts of a checkpoint."""

_rounds = itertools.count()


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found."""

    state: Any
    step: int
    data: Any
    """The position of the data, as it was saved."""
    evaluation: dict[str, float] | None
    left: tuple[str, ...]
    """With `strict=False`, a line for each leaf that did not fit and was left as it was."""


def restored(
    directory: Path, step: int, like: Any, strict: bool
) -> tuple[Restored | None, str]:
    """Restores one checkpoint; the second result tells how it is damaged, if it is.

    **Raises:**

    - `ValueError`: its leaves do not match.
    """
    fault, info = "", {}
    try:
        info = _files.information(directory, step)
        fault = _files.wrong_sizes(directory, step)
    except PermissionError:
        raise  # it may be as good as ever
    except (OSError, ValueError) as e:
        fault = f"its description cannot be read ({e})"
    fault = first_fault(fault)
    if fault:
        return None, fault
    arrays, structure = _tree.split(like, "state")
    wanted = dict(zip(structure.paths(), arrays, strict=True))
    result = compare(
        read_described(info["tree"]), {path: leaf(x) for path, x in wanted.items()}
    )
    if result.problems and strict:
        count = len(result.problems)
        raise ValueError(
            f"The checkpoint of step {step} in {directory} does not fit the state; "
            f"{count} {'leaf differs' if count == 1 else 'leaves differ'}:\n"
            + "\n".join(result.problems)
            + "\nRestore into the model and optimizer that were saved, or load what fits "
            "with Checkpoints(..., strict=False)."
        )
    lost = [p for p, x in wanted.items() if p not in result.fits and not _has_value(x)]
    if lost:
        raise ValueError(
            "These leaves do not fit the checkpoint, and have no value to keep:\n"
            + "\n".join(f"  {p}" for p in lost)
            + "\nRestore into a state, not into shapes."
        )
    values, fault = _read(directory, step, info, {p: wanted[p] for p in result.fits})
    if fault:
        return None, fault
    if result.problems:
        log.warning(
            "The checkpoint of step %d was loaded in part (strict=False); left out:\n%s",
            step,
            "\n".join(result.problems),
        )
    state = structure.join([values.get(path, x) for path, x in wanted.items()])
    found = Restored(state, info["step"], info["data"], info["evaluation"], result.problems)
    return found, ""


def _read(
    directory: Path, step: int, info: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The values of these leaves, and what is wrong with them."""
    full = {path: x for path, x in wanted.items() if x.size}
    values: dict[str, Any] = {}
    fault = ""
    with _given_up_reads_ignored():
        try:
            if full:
                values = _from_files(_files.path(directory, step) / "state", full)
        except Exception as e:  # whatever orbax and tensorstore raise for a damaged file
            if isinstance(e, PermissionError) or "PERMISSION_DENIED" in str(e):
                raise PermissionError(
                    f"The checkpoint of step {step} in {directory} may not be read: {e}"
                ) from e
            fault = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
    fault = first_fault(fault)
    if fault:
        return {}, fault
    sums = checksums([values[path] for path in full])
    wrong = [
        path
        for path, s in zip(full, sums, strict=True)
        if int(np.asarray(s.addressable_data(0))) != info["checksums"].get(path)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return {}, f"wrong checksum of {', '.join(wrong[:3])}{more}"
    for path, x in wanted.items():
        if not x.size:
            values[path] = _place.place(np.zeros(x.shape, x.dtype), x.sharding)
    return values, ""


def _from_files(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    from etils import epath

    o = orbax()
    arguments = {
        path: o.ArrayRestoreArgs(
            sharding=x.sharding, dtype=x.dtype, global_shape=x.shape, strict=True
        )
        for path, x in wanted.items()
    }
    item = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for path, x in wanted.items()
    }
    # The handler itself: orbax's checkpointers wait for all processes at the end, in vain if
    # one of them has met a damaged file.
    return o.PyTreeCheckpointHandler().restore(
        epath.Path(folder),
        args=o.args.PyTreeRestore(item, restore_args=arguments, partial_restore=True),
    )


@contextlib.contextmanager
def _given_up_reads_ignored():
    """When one read fails, orbax drops the others half done, and each complains of that when
    it is collected as garbage."""
    before = sys.unraisablehook

    def hook(unraisable):
        code = getattr(unraisable.object, "cr_code", None)
        ours = code is not None and "orbax" in code.co_filename
        if not ours and str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = before


def _has_value(x: Any) -> bool:
    return not isinstance(x, jax.ShapeDtypeStruct)


def first_fault(mine: str) -> str:
    """What went wrong on some process, told to all; empty if nothing did."""
    if jax.process_count() == 1:
        return mine
    topic = f"meshdp/restore/{next(_rounds)}"
    _jaxapi.store_set(f"{topic}/{jax.process_index()}", mine or "-")
    for p in range(jax.process_count()):
        word = _jaxapi.store_get(f"{topic}/{p}", PATIENCE)
        if word != "-":
            return f"on process {p}: {word or 'no answer'}"
    return ""


def shapes(step: Any, state: Any) -> Any:
    """The shapes of a state with the shardings that a step gives it: a target for restoring.

    `state` may be arrays or shapes, such as `jax.eval_shape` returns. Allocates nothing.
    """
    arrays, structure = _tree.split(state, "state")
    where = [s for s in jax.tree.leaves(step.shardings(state)) if s is not None]
    return structure.join(
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for x, s in zip(arrays, where, strict=True)
        ]
    )


def orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise ImportError(
            "Checkpoints need orbax-checkpoint: pip install 'meshdp[train]'"
        ) from None
    return orbax.checkpoint
