"""Counts the arguments that had to be moved to where a pmap needs them."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Move(NamedTuple):
    """One argument that calls of one mapped function had to move."""

    function: str
    """Name of the mapped function."""

    argument: str
    """The leaf, as in `params['w']`."""

    source: str
    """Where it came from: `"host"`, `"1 device"` or `"8 devices"`."""

    count: int
    """How many calls moved it."""

    bytes: int
    """Bytes moved by all these calls together: of this process, each leaf counted once."""


_lock = threading.Lock()
_moves: dict[tuple[str, str, str], tuple[int, int]] = {}


def stats() -> list[Move]:
    """Lists the arguments that calls of mapped functions had to move, most bytes first.

    A training loop whose state stays in place moves only its batches, from the host. A leaf
    that is listed once for every call should be placed once, before the loop (`replicate`,
    `device_put_sharded`).
    """
    with _lock:
        moves = [Move(*key, *value) for key, value in _moves.items()]
    return sorted(moves, key=lambda m: (-m.bytes, m.function, m.argument))


def reset_stats() -> None:
    """Forgets the moves counted so far."""
    with _lock:
        _moves.clear()


def record(function: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    with _lock:
        for name, leaf in zip(names, leaves, strict=True):
            source = "host"
            if isinstance(leaf, jax.Array):
                n = len(leaf.sharding.device_set)
                source = f"{n} device{'s' * (n > 1)}"
            count, size = _moves.get((function, name, source), (0, 0))
            nbytes = getattr(leaf, "nbytes", None) or np.asarray(leaf).nbytes
            _moves[function, name, source] = (count + 1, size + nbytes)
