"""What several processes do together: agree, and read arrays that lie on all of them."""

import collections
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import _blocks, _jaxapi

WAIT = 60.0
"""Seconds that a process waits for the word of another."""

CHUNK = 2**23
"""How many bytes each process sends in one round; every device holds one from each."""

_rounds: collections.Counter = collections.Counter()


def say(about: str, processes: Sequence[int], word: Any) -> Callable[[int], Any]:
    """Tells the other processes a word, as JSON, and returns how to hear theirs.

    A process that says nothing within `WAIT` seconds is heard as `None`. No device takes part,
    so nothing waits for the step that is running.
    """
    topic = f"meshdp/{about}/{','.join(map(str, processes))}"
    me, n = jax.process_index(), _rounds[topic]
    _rounds[topic] += 1
    _jaxapi.store_set(f"{topic}/{n}/{me}", json.dumps(word))
    if n > 1:
        # All spoke in round n - 1, after they had heard all of round n - 2.
        _jaxapi.store_delete(f"{topic}/{n - 2}/{me}")

    def hear(process: int) -> Any:
        heard = _jaxapi.store_get(f"{topic}/{n}/{process}", WAIT)
        return None if heard is None else json.loads(heard)

    return hear


def disagreements(
    about: str,
    processes: Sequence[int],
    mine: Sequence[Sequence[str]],
    names: Callable[[], Sequence[str]],
) -> list[str]:
    """What differs between the processes, in words; empty if nothing does.

    **Arguments:**

    - `about`: the function that was called.
    - `mine`: for each leaf what must be equal everywhere, and how to show it.
    - `names`: of the leaves.
    """
    me = jax.process_index()
    hear = say(about, processes, mine)
    said = {p: mine if p == me else hear(p) for p in processes}
    faults = [
        f"  process {p} did not call {about} with anything new within {WAIT:g} s"
        for p, word in said.items()
        if word is None
    ]
    faults += [f"  {word['fault']}" for word in said.values() if isinstance(word, dict)]
    lists = {p: word for p, word in said.items() if isinstance(word, (list, tuple))}
    if len(set(map(len, lists.values()))) > 1:
        return faults + [
            f"  process {p}: {len(word)} array{'s' * (len(word) != 1)}"
            for p, word in lists.items()
        ]
    for i in range(len(mine)):
        if len({word[i][0] for word in lists.values()}) > 1:
            shown = ", ".join(f"{word[i][1]} on process {p}" for p, word in lists.items())
            faults.append(f"  {names()[i]}: {shown}")
    return faults


def processes_of(sharding: Any) -> list[int]:
    return sorted({d.process_index for d in sharding.device_set})


def gather(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """The whole values of arrays that lie on several processes, in the host memory of each.

    The blocks travel as bytes, `CHUNK` from each process at a time, so that no device ever
    holds an array whole; a block that all processes have does not travel. All processes must
    call this together.
    """
    everyone = frozenset(range(jax.process_count()))
    me = jax.process_index()
    out = [_blocks.empty(x.shape, x.dtype) for x in arrays]
    found = list(map(_blocks.shards, arrays))
    _blocks.start(found)
    pieces, held_by = [], []
    for i, x in enumerate(arrays):
        _blocks.fill(out[i], found[i])
        for block, holders in _blocks_of(x):
            if holders != everyone:
                pieces.append(out[i][_blocks.slices(block)])
                held_by.append(holders)
    streams: dict[int, list[np.ndarray]] = {p: [] for p in everyone}
    for sender, piece in zip(
        _senders(held_by, [p.nbytes for p in pieces]), pieces, strict=True
    ):
        streams[sender].append(piece)
    longest = max(sum(p.nbytes for p in stream) for stream in streams.values())
    chunk = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
    mine = _Writer(streams[me])
    theirs = {p: _Reader(streams[p]) for p in everyone - {me}}
    for _ in range(-(-longest // chunk)):
        received = _all_gather(mine.take(chunk))
        for p, reader in theirs.items():
            reader.give(received[p])
    return out


def _senders(held_by: Sequence[frozenset[int]], sizes: Sequence[int]) -> list[int]:
    """For each block a process that holds it, so that all send about as many bytes."""
    load: collections.Counter = collections.Counter()
    out = []
    for holders, size in zip(held_by, sizes, strict=True):
        out.append(min(sorted(holders), key=load.__getitem__))
        load[out[-1]] += size
    return out


def _blocks_of(x: jax.Array):
    """Each different block of an array, with the processes that hold it."""
    holders: dict[Any, set[int]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders.setdefault(_blocks.bounds(index, x.shape), set()).add(device.process_index)
    return ((block, frozenset(p)) for block, p in holders.items())


class _Writer:
    """Pieces of memory, read as one stream of bytes."""

    def __init__(self, pieces: Sequence[np.ndarray]):
        self._pieces = iter(pieces)
        self._rest = np.empty(0, np.uint8)

    def take(self, n: int) -> np.ndarray:
        out, done = np.zeros(n, np.uint8), 0
        while done < n:
            if not self._rest.size:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = _bytes(np.ascontiguousarray(piece))
            part = self._rest[: n - done]
            out[done : done + part.size] = part
            done, self._rest = done + part.size, self._rest[part.size :]
        return out


class _Reader:
    """A stream of bytes, put into the pieces of memory that it was read from."""

    def __init__(self, pieces: Sequence[np.ndarray]):
        self._pieces = collections.deque(p for p in pieces if p.nbytes)
        self._begun, self._done = np.empty(0, np.uint8), 0

    def give(self, data: np.ndarray) -> None:
        while data.size and self._pieces:
            piece = self._pieces[0]
            if not self._done:
                self._begun = np.empty(piece.nbytes, np.uint8)
            part = data[: piece.nbytes - self._done]
            self._begun[self._done : self._done + part.size] = part
            self._done, data = self._done + part.size, data[part.size :]
            if self._done == piece.nbytes:
                piece[...] = self._begun.view(piece.dtype).reshape(piece.shape)
                self._pieces.popleft()
                self._done = 0


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def _all_gather(mine: np.ndarray) -> np.ndarray:
    """`[n]` bytes of each process to `[process, n]` on every host, over one device each."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = np.array([first[p] for p in range(jax.process_count())])
    mesh = _jaxapi.auto_mesh(devices, ("process",))
    by_process = NamedSharding(mesh, P("process"))
    part = ((len(devices), mine.size), mine.dtype, by_process, lambda _: mine[None])
    (rows,) = _blocks.assemble([part])
    return _blocks.view(_replicate(mesh)(rows).addressable_data(0))


@functools.lru_cache(maxsize=4)
def _replicate(mesh):
    return jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, P()))
