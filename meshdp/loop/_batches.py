"""Batches of a data set held in memory or read by index, in an order that is a function of
seed, epoch and step alone."""

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import _batch
from .._place import BATCH


class Batches:
    """Batches of a data set, for `fit`, for evaluation, or to iterate over.

    Which examples are in the batch of a step depends on the seed, the epoch and the step, not
    on the number of devices or processes. Each process reads only the rows for its devices.
    The last batch of an epoch is filled up with copies of its last example, and a mask says
    which rows count.

    **Arguments:**

    - `data`: a pytree of arrays with the examples along the leading dimension, or any object
        with `len(data)` and `data[i]`, one example, a pytree of arrays and numbers.
    - `size`: examples in a batch (global).
    - `seed`: shuffles each epoch anew. `None` keeps the order.
    - `epochs`: after how many to end; `None` never ends.
    - `mask`: the name under which batches that are dicts get the mask, float32 `[size]`. Other
        batches become pairs `(batch, mask)`. `None` adds no mask, and is refused when the
        last batch is incomplete.

    Iterators save their position: `get_state()` and `set_state(position)`.

    **Raises:**

    - `ValueError`: arrays disagree about the number of examples, there are none, `size` or
        `epochs` is less than 1, the mask's name is taken, or a mask is needed.
    """

    def __init__(
        self,
        data: Any,
        size: int,
        *,
        seed: int | None = None,
        epochs: int | None = None,
        mask: str | None = "mask",
    ):
        self.data, self.size, self.seed, self.epochs = data, size, seed, epochs
        self.mask = mask
        self._by_index = hasattr(data, "__getitem__") and not isinstance(
            data, (Mapping, list, tuple, np.ndarray, jax.Array)
        )
        problems = [
            f"  {name}={n!r}: expected a whole number from 1"
            for name, n in {"size": size, "epochs": epochs}.items()
            if n is not None
            and (isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1)
        ]
        self.examples = self._count(problems)
        if not problems and mask is None and self.examples % size:
            problems.append(
                f"  mask=None: the {self.examples} examples do not divide by size={size}, so "
                f"the last batch of an epoch has {self.examples % size}; give mask a name and "
                "use it in the loss"
            )
        if isinstance(data, Mapping) and mask in data:
            problems.append(f"  mask={mask!r}: the data has an entry of that name; rename one")
        if problems:
            raise ValueError("Batches cannot use these arguments:\n" + "\n".join(problems))
        self._blocks: tuple[tuple[int, ...], int] = ((0,), 1)
        self._kept: tuple[int, np.ndarray] | None = None

    def _count(self, problems: list[str]) -> int:
        if self._by_index:
            count = len(self.data)
        else:
            paths = jtu.tree_leaves_with_path(self.data)
            counts = {jtu.keystr(p): len(x) if np.ndim(x) else None for p, x in paths}
            if len(set(counts.values())) > 1 or None in counts.values():
                problems += [f"  data{p}: {n} examples" for p, n in counts.items()]
            count = next(iter(counts.values()), 0) or 0
        if not count and not problems:
            problems.append("  data: no examples")
        return count

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.examples // self.size)

    def on(self, mesh: Mesh, spec: P = BATCH) -> "Batches":
        """A copy whose batches have the rows for the devices of this process alone."""
        axes = _batch._row_axes(mesh, spec)
        blocks, _ = _batch._blocks_here(mesh, axes)
        count = int(np.prod([mesh.shape[a] for a in axes]))
        if self.size % count:
            raise ValueError(
                f"Batches of size={self.size} do not divide over the {count} devices along "
                f"{'*'.join(axes)}: {self.size} % {count} = {self.size % count}. Choose "
                f"size={self.size // count * count or count} or "
                f"{(self.size // count + 1) * count}."
            )
        out = object.__new__(Batches)
        out.__dict__.update(self.__dict__)
        out._blocks = (blocks, count)
        return out

    def __iter__(self) -> "Iterator[Any]":
        if jax.process_count() > 1 and self._blocks[1] == 1:
            raise ValueError(
                "With several processes Batches must know the mesh, to read only the rows of "
                "this one: iterate over batches.on(mesh), or give batches to fit."
            )
        return _Epochs(self)

    def read(self, epoch: int, index: int) -> Any:
        """The batch at this place, the rows of this process."""
        start = index * self.size
        rows = np.minimum(np.arange(start, start + self.size), self.examples - 1)
        counts = np.arange(start, start + self.size) < self.examples
        if len(self._blocks[0]) < self._blocks[1]:
            blocks, count = self._blocks
            here = np.arange(self.size).reshape(count, -1)[list(blocks)].ravel()
            rows, counts = rows[here], counts[here]
        batch = self._take(self._order(epoch)[rows])
        if self.mask is None:
            return batch
        mask = counts.astype(np.float32)
        if isinstance(batch, Mapping):
            return {**batch, self.mask: mask}
        return batch, mask

    def _take(self, rows: np.ndarray) -> Any:
        if self._by_index:
            examples = [self.data[int(i)] for i in rows]
            return jax.tree.map(lambda *xs: np.stack(xs), *examples)
        return jax.tree.map(lambda x: np.asarray(x)[rows], self.data)

    def _order(self, epoch: int) -> np.ndarray:
        if self._kept is None or self._kept[0] != epoch:
            order = np.arange(self.examples)
            if self.seed is not None:
                np.random.default_rng((self.seed, epoch)).shuffle(order)
            self._kept = epoch, order
        return self._kept[1]

    def same(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same batch."""
        return {"examples": self.examples, "size": self.size, "seed": self.seed}


class _Epochs:
    """The iterator, at a place that it can say and be put to."""

    def __init__(self, batches: Batches):
        self._batches = batches
        self._epoch = self._index = 0

    def __iter__(self):
        return self

    def __next__(self):
        b = self._batches
        if b.epochs is not None and self._epoch >= b.epochs:
            raise StopIteration
        batch = b.read(self._epoch, self._index)
        self._index += 1
        if self._index == len(b):
            self._epoch, self._index = self._epoch + 1, 0
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "index": self._index, **self._batches.same()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        problems = [
            f"  {name}: {state.get(name)!r} then, {value!r} now"
            for name, value in self._batches.same().items()
            if state.get(name) != value
        ]
        if problems:
            raise ValueError(
                "The position was saved by batches that differ from these, so it would mean "
                "another place:\n" + "\n".join(problems) + "\nUse the same data, size and "
                "seed, or start a new run in another directory."
            )
        self._epoch, self._index = state["epoch"], state["index"]
