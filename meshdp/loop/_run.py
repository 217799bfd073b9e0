"""One run of `fit`."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._place import place
from ..train import TrainState
from . import _describe
from ._checkpoints import Checkpoints
from ._clock import Clock, memory
from ._evaluation import Evaluation
from ._metrics import read, scalars
from ._prefetch import Prefetch, prefetch, rows
from ._signals import Asked, Preempted, Stop
from ._sinks import Sinks
from ._watchdog import Watchdog

log = logging.getLogger("meshdp")


class Run:
    """The state of the loop. `fit` documents the arguments."""

    def __init__(
        self,
        step: Any,
        state: Any,
        batches: Any,
        *,
        steps: int,
        checkpoints: Checkpoints | None,
        evaluate: Any,
        evaluate_every: int,
        sinks: list[Any],
        log_every: int,
        callbacks: Any,
        prefetch_count: int,
        mask: str,
        watchdog: Watchdog | None,
        config: Any,
    ):
        self.step, self.steps = step, steps
        self.state = place(state, step.shardings(state), share=True)
        self.checkpoints = checkpoints
        self.evaluate, self.evaluate_every = evaluate, evaluate_every
        self.sinks = Sinks(sinks, jax.process_index() == 0)
        self.log_every, self.callbacks = log_every, callbacks
        self.watchdog, self.config = watchdog, config
        if isinstance(batches, Prefetch):
            self.feed = batches
        else:
            self.feed = prefetch(batches, step, prefetch_count, mask=mask)
        self.done = 0
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self._pending: tuple[int, dict[str, jax.Array], int] | None = None
        self._position: Any = None
        self._saved: int | None = None
        self._measured: int | None = None  # the step of `evaluation`
        self._ended = False
        self._waited = 0.0
        self._noted: Exception | None = None
        self._missed = False  # whether it was told that the metric is missing

    def go(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.sinks.close)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)
            stack.callback(self.feed.close)
            self.stop = Stop()
            if self.checkpoints is not None:
                # Without, nothing would be saved: signals do what they always do.
                stack.enter_context(self.stop.listening())
            if self.watchdog is not None:
                stack.enter_context(self.watchdog.watching())
            stack.enter_context(self._noting_the_step())
            self._resume()
            self.first = self.done
            self.clock = Clock(self.done, self.steps)
            self.sinks.write(
                "start",
                self.done,
                steps=self.steps,
                **_describe.describe(
                    self.step, _describe.state_arrays(self.state), self.config
                ),
            )
            try:
                self._evaluate_if_missed()
                self._loop()
            except Asked:
                self._preempt()
            self.sinks.write(
                "end",
                self.done,
                text=f"ended after step {self.done}",
                best=self.best,
                best_step=self.best_step,
            )

    def _resume(self) -> None:
        if isinstance(self.state, TrainState):
            self.done = int(np.asarray(self.state.step.addressable_data(0)))
        if self.checkpoints is None:
            return
        there = self.checkpoints.steps()
        if there and not self.checkpoints.resume:
            raise ValueError(
                f"{self.checkpoints.directory} has checkpoints of another run, the newest of "
                f"step {there[-1]}, and resume=False. Choose another directory."
            )
        self.checkpoints.claim()
        found = self.checkpoints.restore(self.state)
        if found is None:
            if there:
                self.sinks.write(
                    "note",
                    self.done,
                    text=f"no checkpoint in {self.checkpoints.directory} is good; beginning "
                    f"at step {self.done}",
                )
            return
        self.state, self.done, self.evaluation = found.state, found.step, found.evaluation
        self._saved, self._position = found.step, found.data
        self._measured = None if found.evaluation is None else found.step
        if found.data is not None:
            self.feed.set_state(found.data)
        self.best, self.best_step = (
            self.checkpoints.best_score(),
            self.checkpoints.best_step(),
        )
        dropped = self.feed.to_drop
        self.sinks.write(
            "note",
            self.done,
            text=f"resumed from the checkpoint of step {self.done} in "
            f"{self.checkpoints.directory}"
            + (
                f"; the batches cannot save their position, so the first {dropped} are read "
                "and dropped"
                if dropped
                else ""
            ),
        )

    def _evaluate_if_missed(self) -> None:
        """The evaluation that a signal interrupted before the run resumed."""
        missed = self._saved is not None and self._measured != self.done
        if missed and self._evaluation_is_due():
            self._evaluate()

    def _loop(self) -> None:
        while self.done < self.steps and not self._ended:
            while not self.feed.ready(0.2) and not self.stop.asked:
                pass
            if not self.stop.begin():
                raise Asked
            batch = self._next_batch()
            self._watch(self.done + 1)
            self.state, aux = self.step(self.state, batch)
            self.done += 1
            self._position = self.feed.get_state()
            found = scalars(aux)
            # The step before this one: the devices have work while its results are read.
            self._settle()
            self._pending = self.done, found, rows(batch)
            self._after_step()
        self._settle()
        self._save_if(self.checkpoints is not None)

    def _after_step(self) -> None:
        last = self.done == self.steps
        save = self.checkpoints is not None and (
            last or self.done % self.checkpoints.every == 0
        )
        evaluate = self._evaluation_is_due()
        if not (save or evaluate):
            return
        self._settle()
        self.clock.pause()
        improved = self._evaluate() if evaluate else False
        self._save_if(save or improved)

    def _evaluation_is_due(self) -> bool:
        at = self.done == self.steps or self.done % self.evaluate_every == 0
        return self.evaluate is not None and at

    def _watch(self, step: int) -> None:
        if self.watchdog is not None and step > self.first + 1:
            self.watchdog.began(f"jit_{getattr(self.step, '__name__', 'step')}", step)

    def _next_batch(self) -> Any:
        try:
            return next(self.feed)
        except StopIteration:
            raise ValueError(
                f"The batches ended after {self.feed.taken}, at step {self.done + 1} of "
                f"{self.steps}; {self._last()} Give more, or batches that repeat, such as "
                "meshdp.Batches(data, size, seed=0), or fewer steps."
            ) from None
        except Exception as e:
            self._note(e, f"This was the batch of step {self.done + 1}; {self._last()}")
            raise

    @contextlib.contextmanager
    def _noting_the_step(self):
        """What a step, an evaluation, a callback or a log raises gets a note of when."""
        try:
            yield
        except Exception as e:
            if e is not self._noted and self.done:
                self._note(e, f"fit had begun {self.done} steps; {self._last()}")
            raise

    def _note(self, e: Exception, text: str) -> None:
        e.add_note(text)
        self._noted = e

    def _last(self) -> str:
        if self.checkpoints is None:
            return "there is no checkpoint."
        try:
            self.checkpoints.wait()
        except Exception as e:
            log.warning(
                "%s: %s", type(e).__name__, "\n".join([str(e), *getattr(e, "__notes__", [])])
            )
        there = self.checkpoints.steps()
        if not there:
            return "there is no checkpoint."
        return f"the last checkpoint is of step {there[-1]}, in {self.checkpoints.directory}."

    def _settle(self) -> None:
        """Reads the results of the step in flight, and tells them."""
        if self._pending is None:
            return
        (step, found, count), self._pending = self._pending, None
        self._watch(step)
        self.metrics = read(found)
        self.clock.finished(count)
        if self.watchdog is not None:
            self.watchdog.rest()
        for callback in self.callbacks:
            answer = callback(step, self.metrics)
            self._ended |= isinstance(answer, (bool, np.bool_)) and bool(answer)
        if self.sinks.ticks:
            self.sinks.tick(
                step,
                loss=self.metrics.get("loss"),
                per_second=self.clock.rate(),
                seconds_left=self.clock.left(),
            )
        if step % self.log_every == 0 or step in (self.first + 1, self.steps):
            waited = self.feed.waited
            self.sinks.write(
                "train",
                step,
                self.metrics,
                steps=self.steps,
                **self.clock.interval(),
                data_seconds=waited - self._waited,
                seconds_left=self.clock.left(),
                **memory(list(self.step.mesh.local_devices)),
            )
            self._waited = waited

    def _evaluate(self) -> bool:
        """Evaluates, and returns whether the result is the best so far."""
        if isinstance(self.evaluate, Evaluation):
            found: Any = self.evaluate(
                self.state, stop=self.stop, watchdog=self.watchdog, step=self.done
            )
        else:
            found = self.evaluate(self.state)
        self.evaluation, self._measured = _numbers(found), self.done
        score = self._score()
        lower = self.checkpoints is None or self.checkpoints.lower_is_better
        improved = score is not None and (
            self.best is None or (score < self.best if lower else score > self.best)
        )
        if improved:
            self.best, self.best_step = score, self.done
        self.sinks.write("evaluation", self.done, self.evaluation, best=improved)
        self._tell_if_the_metric_is_missing()
        return improved and self.checkpoints is not None and self.checkpoints.best > 0

    def _tell_if_the_metric_is_missing(self) -> None:
        c, found = self.checkpoints, self.evaluation or {}
        if c is None or not c.best or c.metric in found or self._missed:
            return
        self._missed = True
        self.sinks.write(
            "note",
            self.done,
            text=f"no checkpoint is kept as the best: the evaluation has no {c.metric!r}, "
            f"but {', '.join(map(repr, found)) or 'nothing'}; name one with "
            "Checkpoints(metric=...)",
        )

    def _score(self) -> float | None:
        if self.checkpoints is not None:
            return self.checkpoints.score(self.evaluation)
        value = (self.evaluation or {}).get("loss")
        return value if value is not None and value - value == 0 else None

    def _save_if(self, wanted: bool) -> None:
        if not wanted or self.checkpoints is None or self._saved == self.done:
            return
        measured = self.evaluation if self._measured == self.done else None
        self.checkpoints.save(self.done, self.state, data=self._position, evaluation=measured)
        self._saved = self.done
        self.sinks.write("checkpoint", self.done, directory=str(self.checkpoints.directory))

    def _preempt(self) -> None:
        self._settle()
        self._save_if(self.done > 0)
        if self.checkpoints is not None:
            self.checkpoints.wait()
        name = self.stop.signal.name if self.stop.signal else "a signal"
        self.sinks.write(
            "note", self.done, text=f"{name}: ended after step {self.done}; {self._last()}"
        )
        raise Preempted(self.done, name)


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise ValueError(
            f"evaluate must return {{name: number}}, but it returned a {type(found).__name__}."
        )
    numbers, wrong = {}, []
    for name, value in found.items():
        try:
            numbers[str(name)] = float(np.asarray(value).reshape(()))
        except (TypeError, ValueError):
            wrong.append(f"  {name}: {value!r}")
    if wrong:
        raise ValueError(
            "evaluate must return numbers, but among them were:\n" + "\n".join(wrong)
        )
    return numbers
