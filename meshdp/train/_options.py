"""The choices of `make_train_step`."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import optax

from .._distribute import describe
from ._precision import Precision
from ._remat import policy_of

GATHER = ("microbatch", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `make_train_step` documents, checked."""

    loss_fn: Callable
    optimizer: Any
    accumulate: int
    gather: str
    shard_update: bool
    precision: Any
    remat: Any
    clip: float | None
    skip: bool
    stop_after: int | None
    stateful: bool
    trains: Any
    problems: dataclasses.InitVar[tuple[str, ...]] = ()
    """Faults found elsewhere, to be told with the others."""

    def __post_init__(self, problems):
        problems = list(problems)
        optimizer: Any = self.optimizer
        if isinstance(optimizer, optax.MultiSteps):
            object.__setattr__(self, "optimizer", optimizer.gradient_transformation())
        if not callable(self.loss_fn):
            problems.append(f"loss_fn: {describe(self.loss_fn)}; it takes a function")
        if not isinstance(self.optimizer, optax.GradientTransformation):
            problems.append(
                f"optimizer: {describe(self.optimizer)}; it takes optax.adamw(3e-4)"
            )
        if not is_count(self.accumulate):
            problems.append(f"accumulate: {self.accumulate!r}; it takes a whole number from 1")
        if self.gather not in GATHER:
            problems.append(f'gather: {self.gather!r}; it takes "microbatch" or "step"')
        for field in ("shard_update", "skip", "stateful"):
            if not isinstance(getattr(self, field), bool):
                given = getattr(self, field)
                problems.append(f"{field}: {given!r}; it takes True or False")
        is_number = isinstance(self.clip, numbers.Real) and not isinstance(self.clip, bool)
        if self.clip is not None and not (is_number and self.clip > 0):
            problems.append(f"clip: {self.clip!r}; it takes a number above 0, or None")
        if self.stop_after is not None and not is_count(self.stop_after):
            problems.append(
                f"stop_after: {self.stop_after!r}; it takes a whole number from 1, or None"
            )
        if self.stop_after is not None and not self.skip:
            problems.append("stop_after: it counts skipped steps, and skip=False skips none")
        for field, read in (("precision", read_precision), ("remat", policy_of)):
            try:
                made = read(getattr(self, field))
            except ValueError as e:
                problems.append(str(e))
            else:
                if field == "precision":
                    object.__setattr__(self, field, made)
        if not problems and self.scales and not self.skip:
            problems.append("skip: float16 finds its loss scale by skipping; leave it True")
        if problems:
            raise ValueError(
                "make_train_step cannot use these arguments:\n"
                + "\n".join(f"  {p.strip()}" for p in problems)
            )
        # So that every optimizer can be told the loss; those that do not ask ignore it.
        optimizer = optax.with_extra_args_support(self.optimizer)
        object.__setattr__(self, "optimizer", optimizer)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, as float16 needs it."""
        return self.precision is not None and self.precision.scales


def is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def read_precision(given: Any) -> Precision | None:
    if given is None or isinstance(given, Precision):
        return given
    return Precision.named(given)
