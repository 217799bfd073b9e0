"""What is said of steps that went wrong: in time, in words, and without waiting for them."""

import collections
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import _draws
from ._lookups import Lookup, lookups, outside
from ._remat import check_names

ADVICE = (
    "Look for labels out of range, a logarithm of or division by 0, or a learning rate that is "
    "too high."
)
ONE_KEY_EACH = "jax.vmap(model)(batch['x'], key=keys)"

Outside = Mapping[tuple[str, int], int]
"""How many values of a leaf of the batch, used as indices of so many, are out of range."""


@dataclasses.dataclass(frozen=True)
class Named:
    """The leaf of each lookup and the number of its classes; to JAX a leaf of its own."""

    lookups: tuple[tuple[str, int], ...] = ()


class Traced:
    """What is found in the program of a loss when it is traced."""

    def __init__(self, name: str, model: Any, remat: Any, paths: Sequence[str], said: set[str]):
        self._name, self._model, self._remat = name, model, remat
        self._paths, self._said = paths, said
        self.lookups: list[Lookup] = []

    def __call__(self, closed: Any, first: int, rows: Sequence[Any]) -> Any:
        """Returns how many values of each lookup are out of range, or `None` without lookups.

        The program's arguments are `first` others, the arrays of the batch and the keys.
        """
        check_names(self._remat, closed, self._name)
        self._check_keys(closed, first, rows)
        self.lookups = lookups(closed, first, len(rows))
        return outside(self.lookups, rows)

    @property
    def named(self) -> Named:
        return Named(tuple((self._paths[f.leaf], f.size) for f in self.lookups))

    def _check_keys(self, closed, weights: int, rows) -> None:
        unread = [
            f"batch{path}"
            for i, (path, x) in enumerate(zip(self._paths, rows, strict=True))
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            and not _draws.reads(closed, weights + i)
        ]
        if unread:
            self._say(
                f"{self._name} does not use the PRNG keys in {', '.join(unread)}. Draw from "
                "them, or leave them out: it gets a key for each example anyway, as keys."
            )
        if _draws.reads(closed, weights + len(rows)):
            return
        rest = len(rows) + 1
        if _draws.draws_alone(closed, [False] * weights + [True] * rest):
            self._say(
                f"{self._name} draws random numbers, but not from its keys, so they are the "
                "same at every step. Draw them from keys, which has one PRNG key for each "
                f"example: {ONE_KEY_EACH}."
            )
            return
        found = _draws.dropouts(self._model)
        if found and not _draws.draws_alone(closed, [False] * (weights + rest)):
            self._say(
                f"{self._name} does not use its keys, so these drop nothing: "
                f"{', '.join(found)}. Give each example its key: {ONE_KEY_EACH}."
            )

    def _say(self, words: str) -> None:
        # A loss is traced several times for one program.
        if words not in self._said:
            self._said.add(words)
            warnings.warn(words, UserWarning, stacklevel=2)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step that was taken, and may not have been computed yet."""

    step: Any
    batch: Any
    guard: Any
    lookups: tuple[tuple[str, int], ...]
    counts: Any
    """int32: the step, and how many values of each lookup were out of range; or `None`."""

    def _read(self) -> np.ndarray:
        # Of one device, as all have the same: 30 us, where the whole takes 70.
        return jax.device_get(self.counts.addressable_data(0))

    def number(self) -> int:
        return int(self._read()[0])

    def outside(self) -> Outside:
        if self.counts is None:
            return {}
        counts = self._read()[1:]
        found: dict[tuple[str, int], int] = {}
        if counts.any():
            for key, n in zip(self.lookups, counts, strict=True):
                # One leaf may be looked up by several times.
                found[key] = max(found.get(key, 0), int(n))
        return {key: n for key, n in found.items() if n}


class Watch:
    """Looks at the steps of one `TrainStep` after they are done.

    The first is waited for, as it was for its compilation, since what is wrong from the start
    shows there. Of the others whatever is ready is read, and nothing waited for.
    """

    def __init__(self, name: str, stop_after: int | None, skips: bool):
        self._name, self._stop_after, self._skips = name, stop_after, skips
        self._recent: collections.deque[Taken] = collections.deque()
        self._pending: collections.deque[Taken] = collections.deque()
        self._is_first = True
        self._told: set[tuple[str, int]] = set()

    def before(self, names: Callable[[], list[str]]) -> None:
        """Looks back before the next step. `names` gives the paths of what trains.

        **Raises:**

        - `FloatingPointError`: if too many steps in a row were not finite.
        """
        while self._pending and self._pending[0].counts.is_ready():
            self._look(self._pending.popleft())
        if len(self._recent) == 2:
            taken = self._recent.popleft()
            rows = int(taken.guard.in_a_row)
            if rows >= (self._stop_after or 0):
                self._recent.clear()
                raise FloatingPointError(
                    f"The {_what(taken.guard, names())} was not finite at step "
                    f"{int(taken.step)}, the last of {rows} such steps in a row.\n"
                    "They were skipped: the model is as it was before them. The batch of that "
                    f"step:\n{_lines(taken.batch, taken.outside())}\n{ADVICE}"
                )

    def after(self, state: Any, metrics: dict, batch: Any, names: Callable) -> None:
        """Takes what is to be looked at out of the metrics of a step."""
        step, guard, named, counts = metrics.pop("watch", (None, None, Named(), None))
        taken = Taken(step, batch, guard, named.lookups, counts)
        if self._stop_after is not None:
            self._recent.append(taken)
        if self._is_first:
            self._is_first = False
            words = self._start(state, metrics, taken, names)
            if words:
                self._told.update(taken.outside())
                warnings.warn(words, RuntimeWarning, stacklevel=3)
            elif counts is not None:
                self._look(taken)
        elif counts is not None and not self._told.issuperset(taken.lookups):
            self._pending.append(taken)

    def _start(self, state, metrics, taken: Taken, names) -> str:
        """What is wrong from the start, if anything."""
        found = jax.device_get({k: metrics[k] for k in ("loss", "weight", "grad_norm")})
        nothing = found["weight"] == 0
        if nothing:
            what = "No example counts, all weights are 0,"
        elif not np.isfinite(found["loss"]):
            what = "The loss was not finite"
        # The state is built when its guard is looked at.
        elif (
            self._skips
            and int(jax.device_get(metrics["skipped"]))
            and int(jax.device_get(state.guard.in_a_row))
        ):
            what = f"The {_what(state.guard, names())} was not finite"
        elif not self._skips and not np.isfinite(found["grad_norm"]):
            what = "The gradient was not finite"
        else:
            return ""
        done = (
            "It was skipped: the model is as it was before."
            if self._skips
            else "It was taken, as skip=False says."
        )
        return (
            f"{what} at step {int(jax.device_get(state.step)) - 1}, the first. {done} The "
            f"batch:\n{_lines(taken.batch, taken.outside())}\n"
            + ("Look at the mask." if nothing else ADVICE)
        )

    def _look(self, taken: Taken) -> None:
        outside = {k: n for k, n in taken.outside().items() if k not in self._told}
        if not outside:
            return
        self._told.update(outside)
        only = {path for path, _ in outside}
        words = (
            f"At step {taken.number()} {self._name} used indices that are out of range:\n"
            f"{_lines(taken.batch, outside, only)}\n"
            "JAX takes the nearest entry for them, one counted from the end, NaN or, in "
            "one_hot, zeros. Correct the data or the number of classes. What does not count "
            "anyway, replace before it is used: jnp.where(mask, labels, 0)."
        )
        warnings.warn(words, RuntimeWarning, stacklevel=4)


def _what(guard, names: Sequence[str]) -> str:
    leaf = int(guard.leaf)
    if leaf < len(names):
        return f"gradient of model{names[leaf]}"
    return "loss" if leaf == len(names) else "update that the optimizer made of the gradient"


def _lines(batch: Any, outside: Outside, only: Any = None) -> str:
    lines = []
    for path, x in jtu.tree_leaves_with_path(batch):
        name = jtu.keystr(path)
        if only is not None and name not in only:
            continue
        line = f"  batch{name}: {_describe(x)}"
        for (leaf, size), n in outside.items():
            if leaf == name:
                line += f"; {n} used as an index of {size}, but not in 0 to {size - 1}"
        lines.append(line)
    return "\n".join(lines)


def _describe(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return repr(x)
    shape = f"{x.dtype}{list(x.shape)}"
    if not jnp.issubdtype(x.dtype, jnp.number) or not x.size:
        return shape
    # What other processes hold, they describe.
    parts = [s.data for s in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    here = np.concatenate([np.ravel(jax.device_get(p)) for p in parts])
    finite = here[np.isfinite(here)]
    bad = f", {here.size - finite.size} not finite" if finite.size < here.size else ""
    span = f" from {finite.min().item():.6g} to {finite.max().item():.6g}" * bool(finite.size)
    return f"{shape}{span}{bad}"
