"""`fit`: a training loop that never waits, and survives."""

import dataclasses
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._distribute import Distributed
from ._checkpoints import Checkpoints
from ._run import Run
from ._sinks import sinks
from ._watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Fitted:
    """How a run ended."""

    state: Any
    step: int
    """Steps taken in all, those before a resumed run's start included."""
    metrics: dict[str, float]
    """Of the last step; empty if none was left to take."""
    evaluation: dict[str, float] | None
    """The last."""
    best: float | None
    """The best of the metric that `Checkpoints` names (`"loss"` without), so far."""
    best_step: int | None


def fit(
    step: Distributed,
    state: Any,
    batches: Any,
    *,
    steps: int,
    checkpoint: "Checkpoints | str | os.PathLike | None" = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    log: Any = "console",
    log_every: int = 10,
    callbacks: Sequence[Callable[[int, dict[str, float]], Any]] = (),
    prefetch: int = 2,
    mask: str = "mask",
    watchdog: Watchdog | None = None,
    config: Any = None,
) -> Fitted:
    """Trains until `steps` steps have been taken, from where the newest checkpoint is.

    ```python
    meshdp.fit(step, state, meshdp.Batches(data, 256, seed=0), steps=10_000,
               checkpoint="runs/1", log=["console", "runs/1/log.jsonl"])
    ```

    The loop gives the devices the next step before it reads the results of the last, so that
    they never wait for the host. With several processes, which `initialize` has joined, all
    call it together.

    With `checkpoint`, SIGTERM and SIGINT end it after the step in flight, or between two
    batches of an `Evaluation`: a checkpoint is written and `Preempted` raised, which ends the
    program with exit status 75. One that comes during compilation is obeyed when that is
    done. A second one does what it did before.

    **Arguments:**

    - `step`: made by `distributed` or `make_train_step`.
    - `state`: for it. The memory of it is given away, as by `step` itself.
    - `batches`: any iterable or iterator of host batches, such as `Batches`; see `prefetch`
        for what it does with them. With several processes, each yields its own rows.
    - `steps`: of the whole run, those of resumed runs included; not those still to do.
    - `checkpoint`: `Checkpoints`, or their directory. With it the run resumes by itself. Saved
        are the state, the position of the batches and the evaluation.
    - `evaluate`: `Evaluation`, or any function `state -> {name: number}`; called every
        `evaluate_every` steps and at the end.
    - `log`: one or several of `"console"`, a path that ends in `.jsonl`,
        `TensorBoard(directory)`, and functions that take a record, a dict; `None` for
        silence. Only process 0 writes. Records have an `"event"`: `"start"` (the
        configuration, mesh, layout, versions, command and git commit), `"train"`,
        `"evaluation"`, `"checkpoint"`, `"note"` and `"end"`; and `"step"` and `"time"`, seconds
        since 1970.
    - `log_every`: steps between two `"train"` records. These have the metrics of the newest
        step, `skipped` among them if it has one; `per_second`, examples (global);
        `step_seconds_p50` and `_p95`; `compile_seconds`, of this process so far;
        `data_seconds`, waited for batches since the record before; `seconds_left`, at the pace
        of this run without compilation;
        `device_bytes` and `device_bytes_peak`, where the device tells them. A metric that has
        one of these names is called `metrics.NAME`.
    - `callbacks`: functions of (step, metrics), called for each step, one step late, on every
        process. One that returns `True` ends the run, as if `steps` were reached; it must do
        so on all processes.
    - `prefetch`: batches kept on the devices ahead.
    - `mask`: the name of the mask in batches that are dicts; see `prefetch`.
    - `watchdog`: what to do about steps that hang; by default nothing.
    - `config`: recorded in the log: a dict, a dataclass, an `argparse.Namespace`.

    **Returns:**

    `Fitted`: the state and the last results.

    **Raises:**

    - `Preempted`: a signal came.
    - `ValueError`: the batches ended early, or one is unlike the first; the checkpoint does
        not fit the state.
    - `OSError`: at the start, if the directory of the checkpoints cannot be written to, or
        another run saves there.
    - Whatever `batches`, a callback, a log, an evaluation or a save raises is raised again,
        with a note that says at which step and what the last checkpoint is. Checkpoints that
        were begun are completed first.
    """
    if not isinstance(step, Distributed):
        raise TypeError(
            "fit takes a step made by meshdp.distributed or meshdp.make_train_step, not a "
            f"{type(step).__name__}. Wrap the function: meshdp.distributed(step)."
        )
    problems = [
        f"  {name}={n!r}: expected a whole number from {least}"
        for name, n, least in (
            ("steps", steps, 0),
            ("log_every", log_every, 1),
            ("evaluate_every", evaluate_every, 1),
            ("prefetch", prefetch, 1),
        )
        if n is not None
        and (isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < least)
    ]
    if not isinstance(checkpoint, (Checkpoints, str, os.PathLike, type(None))):
        problems.append(
            f"  checkpoint={checkpoint!r}: it takes a directory or meshdp.Checkpoints"
        )
    if evaluate is None and evaluate_every is not None:
        problems.append("  evaluate_every: there is no evaluate= to call")
    if evaluate is not None and not callable(evaluate):
        problems.append(
            f"  evaluate={evaluate!r}: it takes meshdp.Evaluation or a function of the state"
        )
    if not isinstance(mask, str):
        problems.append(f"  mask={mask!r}: it takes a name")
    if watchdog is not None and not isinstance(watchdog, Watchdog):
        problems.append(f"  watchdog={watchdog!r}: it takes meshdp.Watchdog(seconds)")
    if isinstance(callbacks, Sequence):
        problems += [
            f"  callbacks[{i}]: {c!r} is no function"
            for i, c in enumerate(callbacks)
            if not callable(c)
        ]
    else:
        problems.append(f"  callbacks={callbacks!r}: it takes a list of functions")
    if problems:
        raise ValueError("fit cannot use these arguments:\n" + "\n".join(problems))
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = Checkpoints(checkpoint)
    run = Run(
        step,
        step.with_arrays(state),
        batches,
        steps=int(steps),
        checkpoints=checkpoint,
        evaluate=evaluate,
        evaluate_every=evaluate_every or steps or 1,
        sinks=sinks(log),
        log_every=log_every,
        callbacks=callbacks,
        prefetch_count=prefetch,
        mask=mask,
        watchdog=watchdog,
        config=config,
    )
    del state  # so that what is restored takes its place
    run.go()
    return Fitted(run.state, run.done, run.metrics, run.evaluation, run.best, run.best_step)
