"""How far a run of known length is: a bar in a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LINES = 10  # plain lines in a run


class _Clock:
    """Steps done, tokens per second and seconds left, of the steps after the first.

    The first step compiles; counted in, it would make the rest look slow. So would those
    before `first`, which an earlier run has taken.
    """

    def __init__(self, steps: int, tokens: int, first: int):
        self.steps, self.tokens, self.first, self.done = steps, tokens, first, first
        self.start = time.perf_counter()

    def tick(self) -> None:
        self.done += 1
        if self.done == self.first + 1:
            self.start = time.perf_counter()

    def __str__(self) -> str:
        if self.done < self.first + 2:
            return ""
        each = (time.perf_counter() - self.start) / (self.done - self.first - 1)
        left = each * (self.steps - self.done)
        return f"{self.tokens / each:,.0f} tokens/s  {left:.0f} s left"


@contextlib.contextmanager
def progress(steps: int, tokens: int, first: int = 0) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the loss after each of `steps` steps.

    `tokens` is their number per step (global); an earlier run has taken the first `first`.
    The bar needs rich and a terminal.
    """
    clock = _Clock(steps, tokens, first)
    bar = _bar(steps)
    if bar is None:

        def advance(loss: float) -> None:
            clock.tick()
            if (
                clock.done == first + 1
                or clock.done * LINES // steps > (clock.done - 1) * LINES // steps
            ):
                width = len(str(steps))
                print(
                    f"step {clock.done:{width}}/{steps}  loss {loss:.3f}  {clock}", flush=True
                )

        yield advance
        return
    with bar:
        task = bar.add_task("compiling", total=steps, completed=first, figures="")

        def advance(loss: float) -> None:
            clock.tick()
            bar.update(
                task, advance=1, description="training", figures=f"loss {loss:.3f}  {clock}"
            )

        yield advance


def _bar(steps: int):
    if not sys.stdout.isatty():
        return None
    try:
        from rich import progress as rich
    except ImportError:
        return None
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[figures]}"),
    )
