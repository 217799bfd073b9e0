"""Saving and restoring the state of a run, through orbax."""

import contextlib
import logging
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import _jaxapi, _tree
from . import _files
from ._checksum import checksums
from ._compare import described
from ._describe import versions
from ._lock import Lock
from ._restore import Restored, first_fault, orbax, restored

log = logging.getLogger("meshdp")


class Checkpoints:
    """Saves states in a directory and restores them, on any number of devices or processes.

    Saving returns when the state has been copied to host memory; a thread writes it, sharded,
    into a folder that gets its name, the step, when it is complete. Needs orbax-checkpoint.
    From the first save (of `fit`: from its start) until `close`, no other run can save there.

    **Arguments:**

    - `directory`: one for each run, seen by all processes. Made when first needed.
    - `every`: `fit` saves after so many steps, at the end, and when it is asked to stop.
    - `keep`: how many of the newest are kept.
    - `best`: how many of the best are kept besides, by `metric` of the evaluation.
    - `metric`, `lower_is_better`: what is best.
    - `resume`: whether `fit` goes on from the newest good one. If `False` and there is one,
        `fit` refuses.
    - `strict`: whether a checkpoint must have exactly the leaves of the state. If `False`,
        those that fit are loaded and the others listed in a warning.

    **Raises:**

    - `ValueError`: `every` or `keep` is less than 1, or `best` less than 0.
    - `ImportError`: orbax-checkpoint is missing.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every: int = 1000,
        keep: int = 3,
        best: int = 1,
        metric: str = "loss",
        lower_is_better: bool = True,
        resume: bool = True,
        strict: bool = True,
    ):
        problems = [
            f"  {name}={n!r}: expected a whole number from {least}"
            for name, n, least in (("every", every, 1), ("keep", keep, 1), ("best", best, 0))
            if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < least
        ]
        if problems:
            raise ValueError("Checkpoints cannot use these arguments:\n" + "\n".join(problems))
        self._orbax = orbax()
        self.directory = Path(directory).absolute()
        self.every, self.keep, self.best = int(every), int(keep), int(best)
        self.metric, self.lower_is_better = metric, lower_is_better
        self.resume, self.strict = resume, strict
        self._writer: Any = None
        self._begun: int | None = None  # the step that is being saved
        self._removing: list[Any] = []
        self._lock = Lock(self.directory)
        self._claimed = False  # by one of the processes

    # Saving.

    def claim(self) -> None:
        """Makes the directory and keeps other runs out of it until `close`; all together.

        **Raises:**

        - `OSError`: it cannot be written to, or another run saves there.
        """
        if self._claimed:
            return
        fault = first_fault(self._lock.take() if jax.process_index() == 0 else "")
        if fault:
            raise OSError(f"No checkpoints can be saved in {self.directory}: {fault}.")
        self._claimed = True

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Any = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> None:
        """Begins to save a state; all processes together.

        It waits for the save before, and until the state is there and copied.

        **Arguments:**

        - `step`: the number of steps taken; the name of the checkpoint.
        - `state`: any pytree of placed arrays. Everything that is no array is left out.
        - `data`: the position of the data, anything that JSON can say.
        - `evaluation`: what was measured on this state.

        **Raises:**

        - `OSError` and what orbax raises: this save, or the one before, failed.
        - `OSError`: another run saves in this directory.
        """
        arrays, structure = _tree.split(state, "state")
        sums = checksums([x for x in arrays if x.size])
        self.wait()
        self.claim()
        if jax.process_index() == 0 and _files.path(self.directory, step).exists():
            self._set_aside(step, "the run has come to this step again", ".replaced")
        named = dict(zip(structure.paths(), arrays, strict=True))
        # Orbax refuses empty arrays; there is nothing in them to save.
        named = {path: x for path, x in named.items() if x.size}
        meta = {
            "format": 1,
            "step": step,
            "tree": described(structure, arrays),
            "checksums": {
                path: int(np.asarray(s.addressable_data(0)))
                for path, s in zip(named, sums, strict=True)
            },
            "data": data,
            "evaluation": dict(evaluation) if evaluation else None,
            "processes": jax.process_count(),
            "versions": versions(),
        }
        o = self._orbax
        if self._writer is None:
            self._writer = o.AsyncCheckpointer(
                o.CompositeCheckpointHandler(
                    state=o.PyTreeCheckpointHandler(), meta=o.JsonCheckpointHandler()
                )
            )
        args = o.args.Composite(state=o.args.PyTreeSave(named), meta=o.args.JsonSave(meta))
        self._begun = step
        with self._telling():
            self._writer.save(_files.path(self.directory, step), args=args)

    def wait(self) -> None:
        """Waits until what was saved is written, and removes what need not be kept.

        **Raises:**

        - What made the save fail.
        """
        if self._writer is None:
            return
        with self._telling():
            self._writer.wait_until_finished()
        step, self._begun = self._begun, None
        if jax.process_index() == 0 and step is not None:
            with contextlib.suppress(OSError):  # a full disk, as the next save will tell
                _files.note_sizes(self.directory, step)
        if jax.process_index() == 0:
            self._remove_superfluous()

    @contextlib.contextmanager
    def _telling(self):
        """Adds to what is raised which checkpoint it was, and forgets that one."""
        try:
            yield
        except BaseException as e:
            step, self._begun = self._begun, None
            if step is not None and isinstance(e, Exception):
                there = [n for n in self.steps() if n != step]
                left = f"the newest is of step {there[-1]}" if there else "there is no other"
                e.add_note(
                    f"The checkpoint of step {step} in {self.directory} was not written to "
                    f"its end; {left}."
                )
            raise

    def close(self) -> None:
        """As `wait`, for good."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            for thread in self._removing:
                thread.join()
            self._removing = []
            self._lock.release()
            self._claimed = False

    def _remove_superfluous(self) -> None:
        scores = self._scores()
        for step in _files.superfluous(scores, self.keep, self.best, self.lower_is_better):
            self._removing.append(_files.remove(self.directory, step))

    def _scores(self) -> dict[int, float | None]:
        scores: dict[int, float | None] = {}
        for step in self.steps():
            try:
                scores[step] = _files.metric(
                    _files.information(self.directory, step), self.metric
                )
            except (OSError, ValueError):
                scores[step] = None
        return scores

    def steps(self) -> list[int]:
        """The steps of the checkpoints that were written to their end, in order."""
        return _files.steps(self.directory)

    def best_step(self) -> int | None:
        """The step of the best checkpoint that there is, by `metric`."""
        scored = [(s, n) for n, s in self._scores().items() if s is not None]
        if not scored:
            return None
        return (min if self.lower_is_better else max)(scored, key=lambda x: x[0])[1]

    def score(self, evaluation: Mapping[str, float] | None) -> float | None:
        """The metric of an evaluation."""
        return _files.metric({"evaluation": evaluation}, self.metric)

    def best_score(self) -> float | None:
        """The best metric of the checkpoints that there are."""
        found = [s for s in self._scores().values() if s is not None]
        if not found:
            return None
        return min(found) if self.lower_is_better else max(found)

    # Restoring.

    @_jaxapi.with_no_mesh_set
    def restore(
        self,
        like: Any,
        *,
        step: int | str = "newest",
        strict: bool | None = None,
    ) -> Restored | None:
        """Restores a state; all processes together.

        Reading is checked against checksums. A damaged checkpoint is reported by a warning of
        the logger `"meshdp"` and gets another name, and the one before it is restored; nothing
        is deleted. Half-written ones are reported too.

        **Arguments:**

        - `like`: the state as it should be: placed arrays, or `jax.ShapeDtypeStruct`s with
            shardings, such as `meshdp.loop.shapes(step, jax.eval_shape(...))`. Any mesh, any
            layout, whatever those of the run that saved it were.
        - `step`: `"newest"`, `"best"`, or a number.
        - `strict`: as for `Checkpoints`.

        **Returns:**

        What was found; `None` if there is no good checkpoint.

        **Raises:**

        - `ValueError`: leaves do not match; each is listed. A damaged checkpoint that was
            asked for by number, or as the best.
        - `PermissionError`: it may not be read.
        """
        if step not in ("newest", "best") and not isinstance(step, numbers.Integral):
            raise ValueError(f'step={step!r}: it takes "newest", "best" or a number of steps.')
        strict = self.strict if strict is None else strict
        if step == "best":
            step = self.best_step() if self.best_step() is not None else "newest"  # type: ignore
        candidates = self.steps()[::-1] if step == "newest" else [int(step)]
        if step != "newest" and step not in self.steps():
            raise ValueError(
                f"{self.directory} has no checkpoint of step {step}. There are: "
                f"{', '.join(map(str, self.steps())) or 'none'}."
            )
        if step == "newest" and jax.process_index() == 0:
            for path in _files.unfinished(self.directory):
                # Else orbax would delete it when this step is saved. One that another run
                # may be writing is left alone.
                new = _files.set_aside(path, ".unfinished") if self._lock.held else None
                log.warning(
                    "%s in %s was not written to its end; %s.",
                    path.name,
                    self.directory,
                    f"kept as {new.name}" if new else "left where it is",
                )
        for candidate in candidates:
            found, fault = restored(self.directory, candidate, like, strict)
            if found is not None:
                return found
            if step != "newest":
                raise ValueError(
                    f"The checkpoint of step {candidate} in {self.directory} is damaged: "
                    f"{fault}"
                )
            if jax.process_index() == 0:
                self._set_aside(candidate, f"it is damaged: {fault}", ".damaged")
        return None

    def _set_aside(self, step: int, why: str, suffix: str) -> None:
        new = _files.set_aside(_files.path(self.directory, step), suffix)
        where = f"kept as {new.name}" if new else "left where it is"
        log.warning(
            "The checkpoint of step %d in %s is not used, since %s; %s.",
            step,
            self.directory,
            why,
            where,
        )
