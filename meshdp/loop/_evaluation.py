"""Means over a whole set of examples, on the mesh that the state lies on."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi, _tree
from .._place import BATCH
from ..train import Mean, TrainState
from ._batches import Batches
from ._metrics import read, scalars
from ._prefetch import check_iterable, prefetch
from ._signals import Asked, Stop
from ._watchdog import Watchdog


class Evaluation:
    """Evaluates a state on a set of batches; for `fit`, or to call with a state.

    Sums and weights are added up over all batches and divided once, so that a set that does
    not divide into batches or over devices gives the exact mean: the rows that were added to
    fill up a batch have a mask of 0.

    ```python
    def measure(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return {"loss": meshdp.Mean.of(losses, batch["mask"])}

    evaluate = meshdp.Evaluation(measure, meshdp.Batches(held_out, 64, epochs=1))
    ```

    **Arguments:**

    - `measure`: `measure(model, batch) -> {name: Mean}`, or one `Mean`, whose name is
        `"loss"`. It sees whole (global) batches and is compiled with the layout that the state
        has. It gets the model of a `TrainState`, and any other state as it is.
    - `batches`: as for `fit`, but finite, and an iterable that can be gone through anew each
        time, or a function that returns one.
    - `spec`, `mask`: as for `prefetch`.

    **Raises:**

    - `ValueError`: `batches` is an iterator, which is empty the second time, or never ends.
    - `TypeError`: `measure` is no function, or `batches` cannot be iterated over.
    """

    def __init__(
        self,
        measure: Callable[[Any, Any], Any],
        batches: Any,
        *,
        spec: P = BATCH,
        mask: str = "mask",
    ):
        if not callable(measure):
            raise TypeError(f"Evaluation measures with a function, not with {measure!r}.")
        if not callable(batches):
            check_iterable(batches)
        if isinstance(batches, Iterator):
            raise ValueError(
                f"Evaluation was given an iterator ({type(batches).__name__}), which is empty "
                "after the first evaluation. Give a list, meshdp.Batches(..., epochs=1), or a "
                "function that returns a new iterator."
            )
        if isinstance(batches, Batches) and batches.epochs is None:
            raise ValueError(
                "Evaluation was given Batches that never end. Give Batches(..., epochs=1)."
            )
        self._measure, self._batches, self._spec, self._mask = measure, batches, spec, mask

        def run(structure, mesh, arrays, batch):
            with _jaxapi.tracing_mesh(mesh):
                found = measure(structure.join(arrays), batch)
            return self._checked(found)

        run.__name__ = f"evaluate_{getattr(measure, '__name__', 'measure')}"
        self.program = f"jit_{run.__name__}"
        self._run = jax.jit(run, static_argnums=(0, 1))

    def _checked(self, found: Any) -> dict[str, Mean]:
        if isinstance(found, Mean):
            found = {"loss": found}
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict):
            found = {"loss": found[0], **found[1]}
        wrong = (
            [f"  {k}: {type(v).__name__}" for k, v in found.items() if not isinstance(v, Mean)]
            if isinstance(found, dict)
            else [f"  {type(found).__name__}"]
        )
        if wrong or not found:
            raise ValueError(
                "An evaluation must measure Means, so that sums and weights can be added up "
                "before dividing, but it returned:\n"
                + "\n".join(wrong or ["  nothing"])
                + "\nReturn {name: meshdp.Mean.of(values, mask)}."
            )
        return dict(found)

    @_jaxapi.with_no_mesh_set
    def __call__(
        self,
        state: Any,
        *,
        stop: Stop | None = None,
        watchdog: Watchdog | None = None,
        step: int = 0,
    ) -> dict[str, float]:
        """The means over all batches. All processes call it together."""
        model = state.model if isinstance(state, TrainState) else state
        arrays, structure = _tree.split(model, "state")
        mesh = arrays[0].sharding.mesh
        batches = self._batches() if callable(self._batches) else self._batches
        feed = prefetch(batches, mesh, spec=self._spec, mask=self._mask)
        sums: dict[str, list[float]] = {}
        pending: Any = {}
        try:
            for batch in feed:
                if stop is not None and not stop.begin():
                    raise Asked
                if watchdog is not None and sums:
                    watchdog.began(self.program, step)
                found = scalars(
                    {
                        name: {"total": m.total, "weight": m.weight}
                        for name, m in self._run(structure, mesh, arrays, batch).items()
                    }
                )
                _add(sums, pending)
                pending = found
        finally:
            feed.close()
            if watchdog is not None:
                watchdog.rest()
        if not pending:
            raise ValueError("There were no batches to evaluate on.")
        _add(sums, pending)
        return {
            name: total / weight if weight else float("nan")
            for name, (total, weight) in sums.items()
        }


def _add(sums: dict[str, list[float]], pending: Any) -> None:
    """Adds up in double precision, on the host."""
    for name, value in read(pending).items():
        name, _, part = name.rpartition(".")
        sums.setdefault(name, [0.0, 0.0])[part == "weight"] += value
