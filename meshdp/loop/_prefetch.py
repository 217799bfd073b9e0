"""Batches read ahead by a thread and put on the devices ahead of the step that needs them."""

import base64
import collections
import json
import logging
import numbers
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._distribute import Distributed
from .._place import BATCH, pad_batch, shard_batch
from ._batches import Batches

log = logging.getLogger("meshdp")


class Prefetch:
    """The iterator that `prefetch` returns, which documents it."""

    def __init__(self, batches: Any, mesh: Mesh, n: int, spec: P, mask: str):
        if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
            raise ValueError(
                f"prefetch keeps n={n!r} batches ahead; n is a whole number from 1."
            )
        check_iterable(batches)
        self._mesh, self._spec, self._mask, self._n = mesh, spec, mask, int(n)
        if isinstance(batches, Batches):
            batches = batches.on(mesh, spec)
        self._source: Any = iter(batches)
        self._saves = hasattr(self._source, "get_state") and hasattr(self._source, "set_state")
        self._start = 0
        self.taken = 0
        """Batches handed out, those before a resumed run's start included."""
        self.waited = 0.0
        """Seconds that the caller has waited for a batch."""
        self._position: Any = None
        self._first: tuple[Any, list[Any]] | None = None
        self._host: queue.Queue[tuple[str, Any, Any]] = queue.Queue(self._n)
        self._placed: collections.deque[tuple[str, Any, Any]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out: what `set_state` takes, as JSON."""
        return {"batches": self.taken, "iterator": self._position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; before the first batch is taken."""
        if self._thread is not None:
            raise ValueError(
                "The position must be set before the first batch is taken; make a new prefetch."
            )
        self._start = self.taken = state["batches"]
        if self._saves and state["iterator"] is not None:
            self._source.set_state(_decoded(state["iterator"]))
            self._position, self._start = state["iterator"], 0

    @property
    def to_drop(self) -> int:
        """Batches that are read and dropped first, since no position can be set."""
        return self._start

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begun = time.monotonic()
        self.ready(None)
        self._place_ahead()
        kind, value, position = self._placed.popleft()
        self.waited += time.monotonic() - begun
        if kind == "batch":
            self.taken += 1
            self._position = position
            # The one just freed: the next batch is on its way before the step is dispatched.
            self._place_ahead()
            return value
        self._placed.append((kind, value, position))
        if kind == "end":
            raise StopIteration
        raise value

    def ready(self, seconds: float | None) -> bool:
        """Waits until there is a batch, for so many seconds at most."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._read, name="meshdp-prefetch", daemon=True
            )
            self._thread.start()
        if self._placed:
            return True
        begun = time.monotonic()
        try:
            self._place(self._host.get(timeout=seconds))
        except queue.Empty:
            return False
        finally:
            self.waited += time.monotonic() - begun
        return True

    def close(self) -> None:
        """Stops reading."""
        self._closed.set()
        while not self._host.empty():
            self._host.get_nowait()
        if self._thread is not None:
            # So that it is not reading when the interpreter ends, unless the source hangs.
            self._thread.join(1.0)

    def _place_ahead(self) -> None:
        while len(self._placed) < self._n:
            try:
                self._place(self._host.get_nowait())
            except queue.Empty:
                return

    def _place(self, item: tuple[str, Any, Any]) -> None:
        # Not in the thread: with several processes the order of placements must be the same
        # on all, evaluation included.
        kind, batch, position = item
        if kind == "batch":
            try:
                batch = shard_batch(self._checked(batch), self._mesh, self._spec, share=True)
            except (ValueError, TypeError) as e:
                kind, batch = "error", e
        self._placed.append((kind, batch, position))

    def _read(self) -> None:
        try:
            if self._start:
                log.info(
                    "The batches cannot save their position (get_state, set_state): reading "
                    "and dropping the first %d.",
                    self._start,
                )
            for i in range(self._start):
                if self._closed.is_set():
                    return
                try:
                    next(self._source)
                except StopIteration:
                    raise ValueError(
                        f"The batches ended after {i}, but the run had taken {self._start} "
                        "when it was saved. Give the same batches again, from their start."
                    ) from None
            while True:
                batch = next(self._source)
                position = _encoded(self._source.get_state()) if self._saves else None
                if not self._put(("batch", batch, position)):
                    return
        except StopIteration:
            self._put(("end", None, None))
        except BaseException as e:
            self._put(("error", e, None))

    def _put(self, item: tuple[str, Any, Any]) -> bool:
        while not self._closed.is_set():
            try:
                self._host.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def _checked(self, batch: Any) -> Any:
        """The batch, padded if it is short; raises if it is not like the first."""
        leaves, treedef = jtu.tree_flatten(batch)
        shapes = [(np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in leaves]
        if self._first is None:
            self._first = treedef, shapes
            return batch
        if (treedef, shapes) == self._first:
            return batch
        names = [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(batch)]
        first_treedef, first_shapes = self._first
        if treedef != first_treedef:
            raise ValueError(
                "The batch has another structure than the first one, which the step was "
                f"compiled for.\n  first: {first_treedef}\n  now:   {treedef}\n"
                "Give every batch the same entries."
            )
        changed = [
            f"  {name}: {dtype}{list(shape)}, was {first[1]}{list(first[0])}"
            for name, (shape, dtype), first in zip(names, shapes, first_shapes, strict=True)
            if (shape[1:], dtype) != (first[0][1:], first[1]) or len(shape) != len(first[0])
        ]
        rows = {(s[0], f[0]) for (s, _), (f, _) in zip(shapes, first_shapes, strict=True) if s}
        if changed or len(rows) != 1 or next(iter(rows))[0] > next(iter(rows))[1]:
            changed = changed or [
                f"  {name}: {dtype}{list(shape)}, was {first[1]}{list(first[0])}"
                for name, (shape, dtype), first in zip(names, shapes, first_shapes, strict=True)
                if shape != first[0]
            ]
            raise ValueError(
                "The batch has other shapes or dtypes than the first one, which the step was "
                "compiled for:\n" + "\n".join(changed) + "\nOnly the number of rows may be "
                "less, in a batch with a mask."
            )
        have, want = next(iter(rows))
        return self._padded(batch, have, want)

    def _padded(self, batch: Any, have: int, want: int) -> Any:
        if not (isinstance(batch, Mapping) and self._mask in batch):
            raise ValueError(
                f"The batch has {have} rows where the first had {want}, and no mask to say "
                f"that the {want - have} to be added do not count. Give every batch an entry "
                f"{self._mask!r} of ones, and the loss Mean.of(losses, batch[{self._mask!r}]); "
                "meshdp.Batches does so."
            )
        padded, _ = pad_batch(batch, want)
        mask = np.array(padded[self._mask])
        mask[have:] = 0
        return {**padded, self._mask: mask}


def check_iterable(batches: Any) -> None:
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"The batches, of type {type(batches).__name__}, cannot be iterated over. "
            "Give a list, a generator, meshdp.Batches or any other iterable."
        )
    if isinstance(batches, (Mapping, str, bytes)):
        raise TypeError(
            f"The batches are a {type(batches).__name__}, which is one thing, not many. "
            "Give meshdp.Batches(data, size), or a list or generator of batches."
        )


def _encoded(state: Any) -> Any:
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    try:
        return json.loads(json.dumps(state))
    except TypeError as e:
        raise TypeError(
            f"get_state() of the batches returned what cannot be saved ({e}). Return bytes, or "
            "numbers, strings, lists and dicts of these."
        ) from None


def _decoded(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"base64"}:
        return base64.b64decode(state["base64"])
    return state


def prefetch(
    batches: Any, to: Any, n: int = 2, *, spec: P | None = None, mask: str = "mask"
) -> Prefetch:
    """Reads batches ahead in a thread, and keeps `n` of them on the devices ahead.

    While a step runs, the next batches are read and travel. `fit` does this by itself.

    **Arguments:**

    - `batches`: any iterable or iterator of host batches; with several processes, of the rows
        of this one (`meshdp.Batches` sees to that). A batch with fewer rows than the first
        is filled up with copies of its last row, which its mask does not count.
    - `to`: a step, of `distributed` or `make_train_step`, or a mesh.
    - `n`: batches on the devices ahead of the one in use; as many again are held on the host.
    - `spec`: of the batch; the step's, or the rows over `("data", "fsdp")`.
    - `mask`: the name of the mask in batches that are dicts.

    **Returns:**

    An iterator of global batches. `get_state()` gives the position, for `set_state()` of a new
    one: saved by the iterator itself if it has these two methods (as grain's do), else
    counted, so that a new one must read and drop as many batches.

    **Raises:**

    - `ValueError`: from the iterator, when a batch has another structure, shape or dtype than
        the first; or fewer rows and no mask. Whatever `batches` raises is raised again.
    """
    if not isinstance(to, (Mesh, Distributed)):
        raise TypeError(
            f"prefetch puts batches where a step or a mesh wants them, not a "
            f"{type(to).__name__}."
        )
    mesh = to if isinstance(to, Mesh) else to.mesh
    default: P = BATCH if isinstance(to, Mesh) else to._batch
    return Prefetch(batches, mesh, n, default if spec is None else spec, mask)


def rows(batch: Any) -> int:
    """Examples in a batch: the leading dimension of its arrays, as they are (global)."""
    return next((x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x)), 0)
