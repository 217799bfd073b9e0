"""What a pipeline's schedule takes, and how a compiled program says which one it runs."""

import dataclasses
import re

_SCOPE = re.compile(
    r"\b(pipeline|pipeline_loss)\(stages=(\d+),microbatches=(\d+),repeats=(\d+)(,whole)?"
    r"(,zero)?\)"
)

BACK = "back"
"""The name of what sends to the stage before, where no transposition tells."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline of p stages, m microbatches and v repeats.

    A *tick* is the work of one device on one microbatch: a v-th of its layers.
    """

    block: str
    """The function that runs it: `pipeline` or `pipeline_loss`."""

    stages: int
    microbatches: int
    repeats: int = 1

    remat: bool = True
    """Whether only the inputs of stages are kept for the backward pass."""

    zero_bubble: bool = False
    """Whether the gradients of weights are left for later."""

    @property
    def ticks(self) -> int:
        """Of the forward pass, and of the backward pass."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of time in which a device has nothing to do."""
        return self.bubble_of(self.ticks)

    def bubble_of(self, ticks: float) -> float:
        """The same, if each pass took so many ticks."""
        busy = self.repeats * self.microbatches
        if not self.zero_bubble:
            return (ticks - busy) / ticks
        # Forward, perhaps forward anew, and backward for inputs; each in every tick. What the
        # weights get takes as long, and is done when there is something to do only.
        passes = 3 if self.remat else 2
        return passes * (ticks - busy) / (passes * ticks + busy)

    @property
    def kept(self) -> int:
        """The inputs of a tick that a device keeps for the backward pass, at most."""
        if self.block == "pipeline":
            return self.ticks
        busy = self.repeats * self.microbatches
        return min(busy, 2 * self.repeats * self.stages - 1)

    @property
    def scope(self) -> str:
        """The `jax.named_scope` around it, by which `read` knows it in a compiled program."""
        sizes = f"stages={self.stages},microbatches={self.microbatches},repeats={self.repeats}"
        options = ",whole" * (not self.remat) + ",zero" * self.zero_bubble
        return f"{self.block}({sizes}{options})"

    @classmethod
    def read(cls, op_name: str) -> "Schedule | None":
        """The schedule whose scope an operation is in, if any; the innermost."""
        found = _SCOPE.findall(op_name)
        if not found:
            return None
        block, p, m, v, whole, zero = found[-1]
        return cls(block, int(p), int(m), int(v), not whole, bool(zero))


def bubble(
    stages: int,
    microbatches: int,
    repeats: int = 1,
    *,
    remat: bool = True,
    zero_bubble: bool = False,
) -> float:
    """The share of time in which a device of the pipeline has nothing to do.

    `(p - 1) / (v * m + p - 1)` for p stages, m microbatches and v repeats (Narayanan et al.
    2021, section 2.2): p - 1 of v * m + p - 1 ticks. The same for `pipeline` and
    `pipeline_loss`. With `zero_bubble`, if a layer takes as long forward, forward anew with
    `remat`, backward for its input and backward for its weights: the last has no bubble, so
    `3(p - 1) / (4vm + 3(p - 1))`, and without `remat` `2(p - 1) / (3vm + 2(p - 1))`.
    """
    return Schedule("", stages, microbatches, repeats, remat, zero_bubble).bubble
