"""What a pipeline's schedule takes, and how a compiled program says which one it runs."""

import dataclasses
import re

_SCOPE = re.compile(
    r"\b(pipeline|pipeline_loss)\(stages=(\d+),microbatches=(\d+),repeats=(\d+)(,whole)?\)"
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

    @property
    def ticks(self) -> int:
        """Of the forward pass, and of the backward pass."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which a device has nothing to do."""
        return (self.stages - 1) / self.ticks

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
        return f"{self.block}({sizes}{'' if self.remat else ',whole'})"

    @classmethod
    def read(cls, op_name: str) -> "Schedule | None":
        """The schedule whose scope an operation is in, if any; the innermost."""
        found = _SCOPE.findall(op_name)
        if not found:
            return None
        block, p, m, v, whole = found[-1]
        return cls(block, int(p), int(m), int(v), not whole)


def bubble(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The share of time in which a device of the pipeline has nothing to do.

    `(p - 1) / (v * m + p - 1)` for p stages, m microbatches and v repeats (Narayanan et al.
    2021, section 2.2): of a tick's length, p - 1 of v * m + p - 1 ticks. The same for
    `pipeline` and `pipeline_loss`.
    """
    return Schedule("pipeline", stages, microbatches, repeats).bubble
