"""`pmap`, as `jax.pmap` was before 0.10 and more forgiving.

Differences from `jax.pmap`, each with a test of its own:

| | `jax.pmap` | here |
| --- | --- | --- |
| arguments on other devices, meshes, axis types | an error | moved; `stats()` counts them |
| more replicas than devices | an error | several replicas on each device |
| `pmap` inside `pmap` | an error | one mesh axis each, or vectorised |
| `pmap(f)` or `pmap(partial(f, c))` made again | compiled again | compiled once |
| negative `out_axes` | a wrong shape | as in `jax.vmap` |
| static arguments by keyword | an error | work |
| an axis name that is no string | an error | vectorised, with that name |
| a donated argument that had to be moved | kept alive | deleted |
| collectives over an unknown axis | `NameError` | the same, with what to write |
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import methodcaller
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from compat import _axes, _identity
from compat._aot import Lowered
from compat._axes import Names
from compat._bodies import Axes, NeedAxis, Resize, frames, within
from compat._collectives import explain, groups_need_devices
from compat._entry import Devices, Entry
from compat._statics import Statics
from meshdp import _jaxapi
from meshdp._place import local_rows

_sharding_of = _jaxapi.sharding_of
_flatten = jtu.default_registry.flatten  # `jtu.tree_flatten` without a Python function around
_at_top_level = _jaxapi.at_top_level
_is_deleted = methodcaller("is_deleted")


def pmap(
    fun: Callable,
    axis_name: Hashable = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    static_broadcasted_argnames: str | Iterable[str] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Callable:
    """Runs `fun` once for each index of its arguments' leading dimension, all in parallel.

    ```python
    step = compat.pmap(step, axis_name="batch", donate_argnums=0)
    state, loss = step(compat.replicate(state), compat.shard(batch))
    ```

    **Arguments:**

    - `fun`: a function of arrays and pytrees of arrays; it sees one replica's share, without
        the mapped dimension.
    - `axis_name`: what collectives inside `fun` call the axis.
    - `in_axes`: for each positional argument the dimension to map, or `None` to give every
        replica the whole; or one for all. Arguments by keyword are mapped over dimension 0.
    - `out_axes`: where the mapped dimension goes in the result; `None` keeps one replica's.
    - `static_broadcasted_argnums`, `static_broadcasted_argnames`: hashable arguments that are
        constants of the program.
    - `devices`: where to run; by default the first of all devices. In several processes the
        same list everywhere.
    - `backend`: a platform to take the devices from.
    - `axis_size`: the number of replicas, over all processes; needed where nothing is mapped.
    - `donate_argnums`: arguments whose memory may be reused; they cannot be read afterwards.

    **Returns:**

    A function with the mapped dimension in front of every argument and result. Sizes are
    those of this process; results are spread over the devices. It has `.lower(...)` and
    `__wrapped__`.

    **Raises:**

    - `ValueError`: if sizes, trees or axes do not fit; the arguments are named.
    - `TypeError`: if `in_axes` or `out_axes` hold anything but ints and `None`.
    - `NameError`: if `fun` uses an axis that nobody named.
    """
    if not callable(fun):
        raise TypeError(f"pmap expects a function as its first argument, not {fun!r}.")
    devices = None if devices is None else _axes.device_list(devices, "pmap")
    axis_size = _axes.positive(axis_size)
    try:
        hash(axis_name)
    except TypeError:
        raise TypeError(
            f"axis_name of pmap is {axis_name!r}, which cannot be hashed. Give one string: a "
            "map has one axis."
        ) from None
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    in_axes, out_axes = _axes.spell(in_axes, "in_axes"), _axes.spell(out_axes, "out_axes")
    statics = Statics(fun, static_broadcasted_argnums, static_broadcasted_argnames)
    donate = statics.donated(donate_argnums)
    variant = (
        axis_name,
        *(_hashable(a) for a in (in_axes, out_axes)),
        statics.key,
        donate,
        devices,
        backend,
        axis_size,
    )
    program = _identity.shared(
        fun,
        variant,
        lambda get: _Program(
            get, axis_name, in_axes, out_axes, statics, donate, devices, backend, axis_size
        ),
    )
    split = statics.split if statics.any else None

    @functools.wraps(fun, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        constants: Any = ()
        if split is not None:
            constants, args, kwargs = split(args, kwargs)
        entry = program.last
        if entry is not None and entry.statics == constants:
            # Nothing but identity comparisons between here and the compiled program: a call
            # on arguments in place must cost what `jax.jit` costs.
            if kwargs:
                leaves, treedef = _flatten((args, kwargs))
                ready = entry.treedef == treedef
            else:
                leaves, treedef = _flatten(args)
                ready = entry.positional == treedef
            try:
                found = list(map(_sharding_of, leaves))
                ready = ready and found == entry.shardings
            except AttributeError:  # NumPy or a tracer
                ready = False
            if (
                ready
                and (entry.border is None or _at_top_level())
                and not (_Program.donating and _cannot_run(leaves, entry))
            ):
                entry.shardings = found
                try:
                    return entry.run(*leaves)
                except (Resize, NeedAxis):
                    pass
                except (NameError, NotImplementedError) as e:
                    program.reraise(e)
        return program.call(constants, args, kwargs)

    def lower(*args: Any, **kwargs: Any) -> Lowered:
        constants, args, kwargs = statics.split(args, kwargs)
        return program.lower(constants, args, kwargs)

    # The program holds its function weakly, so both of these must hold it.
    mapped.__wrapped__ = lower.__wrapped__ = fun  # type: ignore[attr-defined]
    mapped.lower = lower  # type: ignore[attr-defined]
    return mapped


def _hashable(axes: Any) -> Hashable:
    leaves, tree = jtu.tree_flatten(axes)
    return tuple(leaves), tree


def _addressable(x: Any) -> bool:
    """Whether all of `x` is on this process. A tracer is taken to be."""
    return not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.is_fully_addressable


def _cannot_run(leaves: Sequence[jax.Array], entry: Entry) -> bool:
    """Whether an argument is deleted, or one to be donated is given twice: XLA would end the
    process with a segmentation fault."""
    if any(map(_is_deleted, leaves)):
        return True
    return bool(entry.donated) and len(set(map(id, leaves))) < len(leaves)


class _Program:
    """All the compiled forms of one mapped function."""

    donating = False  # whether any mapped function donates: if none does, nothing is deleted

    def __init__(
        self, get, axis_name, in_axes, out_axes, statics, donate, devices, backend, axis_size
    ):
        self.get, self.axis_name = get, axis_name
        self.in_axes, self.out_axes = in_axes, out_axes
        self.statics, self.donate = statics, donate
        self.devices, self.backend, self.axis_size = devices, backend, axis_size
        self.entries: dict[Any, Entry] = {}
        self.last: Entry | None = None
        if donate:
            _Program.donating = True

    def call(self, constants, args, kwargs) -> Any:
        leaves, treedef = _flatten((args, kwargs))
        if not all(map(_addressable, leaves)):
            leaves = [x if _addressable(x) else local_rows(x) for x in leaves]
            args, kwargs = jtu.tree_unflatten(treedef, leaves)
        names, axes, size = self.understand(constants, args, kwargs, leaves)
        try:
            if _jaxapi.nothing_traced():
                return self.run(constants, leaves, treedef, names, axes, size)
            return self.trace(constants, leaves, treedef, axes, size)
        except (NameError, NotImplementedError) as e:
            self.reraise(e, size)

    def understand(self, constants, args, kwargs, leaves) -> tuple[Names, Axes, int]:
        dynamic = self.statics.dynamic(constants, len(args))
        names = Names(self.get(), dynamic, args, kwargs)
        in_axes = self.in_axes
        if isinstance(in_axes, tuple) and dynamic is not None:
            in_axes = tuple(in_axes[i] for i in dynamic if i < len(in_axes))
        given = _axes.flat_in_axes(in_axes, args, kwargs, names)
        axis_size = self.axis_size
        if axis_size is not None and jax.process_count() > 1:
            axis_size //= len({d.process_index for d in self.pool(False)})
        size, resolved = _axes.mapped_size(leaves, given, in_axes, axis_size, names)
        if axis_size not in (None, size):
            raise ValueError(
                f"axis_size={self.axis_size} of pmap says {axis_size} replicas, but the mapped "
                f"dimensions are {size} long. Leave axis_size out, or change the arguments."
            )
        return names, Axes(tuple(given), resolved, self.out_axes), size

    def pool(self, local: bool) -> Sequence[Any]:
        if self.devices is not None:
            here = jax.process_index()
            return [d for d in self.devices if d.process_index == here or not local]
        if local or jax.process_count() == 1:
            return jax.local_devices(backend=self.backend)
        # All devices of one process together, in the order of the processes.
        return [
            d
            for p in range(jax.process_count())
            for d in jax.local_devices(process_index=p, backend=self.backend)
        ]

    def entry(
        self, constants, treedef, axes: Axes, size: int, local: bool
    ) -> tuple[Any, Entry]:
        key = (treedef, constants, axes.given, axes.resolved, size, local)
        found = self.entries.get(key)
        if found is None:
            devices = Devices(self.pool(local), size)
            run = self.runner(constants, treedef)
            donated = self.donated(treedef, constants)
            found = self.entries[key] = Entry(
                run, axes, (treedef, constants), self.axis_name, devices, donated
            )
        return key, found

    def runner(self, constants, treedef) -> Callable:
        def run(leaves: Sequence[Any]) -> Any:
            args, kwargs = jtu.tree_unflatten(treedef, leaves)
            args, kwargs = self.statics.join(constants, args, kwargs)
            return self.get()(*args, **kwargs)

        return run

    def donated(self, treedef, constants) -> list[int]:
        """The positions of the leaves that may be given away."""
        args = treedef.children()[0].children()
        dynamic = self.statics.dynamic(constants, len(args))
        count = len(args) + sum(isinstance(place, int) for place, *_ in constants)
        donate = {i + count if i < 0 else i for i in self.donate}
        where, start = [], 0
        for i, arg in enumerate(args):
            if (i if dynamic is None else dynamic[i]) in donate:
                where += range(start, start + arg.num_leaves)
            start += arg.num_leaves
        return where

    @_jaxapi.with_no_mesh_set
    def run(self, constants, leaves, treedef, names, axes, size) -> Any:
        key, entry = self.entry(constants, treedef, axes, size, local=False)
        while True:
            placed = entry.place(leaves, names, self.name)
            try:
                out = entry.run(*placed)
                break
            except NeedAxis as need:
                entry = self.entries[key] = entry.with_spare(need.axis)
        entry.forget_donated(leaves, placed)
        if entry.spares:
            entry.shardings = [getattr(x, "sharding", None) for x in placed]
        self.last = entry
        return out

    def trace(self, constants, leaves, treedef, axes, size) -> Any:
        leaves = [x if hasattr(x, "shape") else jnp.asarray(x) for x in leaves]
        if frames() or not jax.sharding.get_abstract_mesh().empty:
            run = self.runner(constants, treedef)
            name = self.axis_name
            given = name is not None
            inner = within(run, axes, name if given else "_pmap", given, size)
            around = jax.sharding.get_abstract_mesh()
            if frames() or around.manual_axes:
                return inner(*leaves)
            # Someone's `jax.set_mesh`: every device computes the whole. Manual, because
            # collectives of `vmap` do not know the types of an Explicit mesh.
            leaves = [_jaxapi.unsharded(x) for x in leaves]
            return _jaxapi.shard_map(
                inner, in_specs=P(), out_specs=P(), axis_names=around.axis_names
            )(*leaves)
        key, entry = self.entry(constants, treedef, axes, size, local=True)
        while True:
            try:
                return entry.traced(*entry.place_traced(leaves))
            except NeedAxis as need:
                entry = self.entries[key] = entry.with_spare(need.axis)

    def lower(self, constants, args, kwargs) -> Lowered:
        leaves, treedef = _flatten((args, kwargs))
        names, axes, size = self.understand(constants, args, kwargs, leaves)
        key, entry = self.entry(constants, treedef, axes, size, local=False)
        while True:
            try:
                return Lowered(entry, leaves, self.name)
            except NeedAxis as need:
                entry = self.entries[key] = entry.with_spare(need.axis)
            except (NameError, NotImplementedError) as e:
                self.reraise(e, size)

    @property
    def name(self) -> str:
        fun = self.get()
        while isinstance(fun, functools.partial):
            fun = fun.func
        return getattr(fun, "__name__", type(fun).__name__)

    def reraise(self, error: NameError | NotImplementedError, size: int = 0) -> NoReturn:
        """Says it better where we can; the traceback still ends in the user's line."""
        if isinstance(error, NotImplementedError):
            better = groups_need_devices(error, size, len(self.pool(False)))
        else:
            around = [(f.name, f.given) for f in frames()]
            better = explain(error, [*around, (self.axis_name, self.axis_name is not None)])
        raise better.with_traceback(error.__traceback__) from None
