"""One compiled form of a mapped function: for one tree of arguments, on one set of devices."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from compat import _bodies, _stats
from compat._axes import Names, spec
from compat._bodies import Axes, Axis, Frame, Run
from compat._move import give_up, moved
from compat._processes import Border
from meshdp import _jaxapi

_NO_KEYWORDS = jtu.tree_structure({})
_NEVER = jtu.tree_structure(0)  # arguments are a tuple


class Devices:
    """The devices for a number of replicas, and how many replicas share each."""

    def __init__(self, pool: Sequence[Any], size: int):
        # This process's replicas go to its own devices, and every process does the same.
        here = jax.process_index()
        own = [d for d in pool if d.process_index == here]
        if not own:
            raise ValueError(
                f"None of the {len(pool)} devices of this pmap belongs to process {here}. "
                "Give devices= at least one device of every process that calls it."
            )
        fits = max(d for d in range(1, min(size, len(own)) + 1) if size % d == 0)
        self.pool, self.share = pool, size // fits
        taken: dict[int, int] = {}
        self.devices = []
        for d in pool:
            if taken.setdefault(d.process_index, 0) < fits:
                taken[d.process_index] += 1
                self.devices.append(d)
        self.processes = len(taken)
        self.size = size * self.processes  # replicas of all processes
        self.room = len(pool) if self.processes == 1 else 0


class Entry:
    """See the module. `run(*leaves)` wants leaves laid out as `shardings` says."""

    def __init__(
        self,
        run: Run,
        axes: Axes,
        key: tuple[Any, Any],
        name: Hashable,
        devices: Devices,
        donated: Sequence[int],
        spares: tuple[Axis, ...] = (),
    ):
        self.treedef, self.statics = key
        args, kwargs = self.treedef.children()
        self.positional = args if kwargs == _NO_KEYWORDS else _NEVER
        self.user_run, self.axes, self.name = run, axes, name
        self.devices, self.donated, self.spares = devices, tuple(donated), spares
        given = name is not None
        # A spec takes the empty name for none.
        known = name if isinstance(name, str) and name else "_pmap" if name is None else None
        self.vectorised = devices.share > 1 or known is None
        axis = Axis(known or "_pmap", len(devices.devices))
        shape = (axis.size, *(s.size for s in spares))
        used = int(np.prod(shape))
        grid = devices.devices if not spares else _pool(devices, used)
        mesh = _jaxapi.auto_mesh(
            np.array(grid, dtype=object).reshape(shape), (axis.name, *(s.name for s in spares))
        )
        frame = Frame(name if given else axis.name, given, axis.size, spares, devices.room)
        if self.vectorised:
            program = _bodies.vectorised(run, axes, name, devices.size, frame._replace(room=0))
        else:
            program = _bodies.mapped(run, axes, axis, frame, mesh)
        program = _bodies.at_top_level(program)
        self.mesh = mesh
        self.shardings: list[Any] = [
            NamedSharding(mesh, spec(a, axis.name)) for a in axes.resolved
        ]
        self.targets = self.shardings
        # With maps inside, results lie over several axes, and come back that way.
        where = (
            {}
            if spares
            else {
                "in_shardings": tuple(self.targets),
                "out_shardings": _bodies.out_shardings(axes, mesh, axis.name),
            }
        )
        self.jitted = jax.jit(program, donate_argnums=self.donated, **where)
        self.traced = jax.jit(program.__wrapped__)
        self.border = Border(mesh) if devices.processes > 1 else None
        self.run: Callable = self.jitted
        if self.border is not None:
            self.targets = [NamedSharding(self.border.local, s.spec) for s in self.shardings]
            self.global_shardings, self.shardings = self.shardings, self.targets
            self.run = self._run_over_processes

    def with_spare(self, axis: Axis) -> "Entry":
        """The same, with one more mesh axis for a map within."""
        devices = self.devices
        key = (self.treedef, self.statics)
        spares = (*self.spares, axis)
        return Entry(self.user_run, self.axes, key, self.name, devices, self.donated, spares)

    def _run_over_processes(self, *leaves: Any) -> Any:
        assert self.border is not None
        leaves_ = self.border.to_global(leaves, self.global_shardings)
        return self.border.to_local(self.jitted(*leaves_))

    def place(self, leaves: Sequence[Any], names: Names, function: str) -> list[Any]:
        """The leaves laid out as `run` wants them; what had to move is counted."""
        refuse_deleted(leaves, names)
        out, elsewhere = moved(leaves, self.targets, self._stays if self.spares else None)
        if elsewhere:
            told = names.leaves()
            _stats.record(
                function, [told[i] for i in elsewhere], [leaves[i] for i in elsewhere]
            )
        times = Counter(map(id, leaves)) if self.donated else {}
        for i in self.donated:
            # XLA ends the process when memory is donated twice, or donated and used.
            if times[id(leaves[i])] > 1 and isinstance(out[i], jax.Array):
                out[i] = jnp.copy(out[i])
        return out

    def _stays(self, x: jax.Array) -> bool:
        """With maps inside, any layout on our mesh will do."""
        return isinstance(x.sharding, NamedSharding) and x.sharding.mesh == self.mesh

    def place_traced(self, leaves: Sequence[Any]) -> list[Any]:
        """As `place`, inside a transformation, where only JAX can move things."""
        if self.vectorised:
            return list(leaves)

        def move(x: Any, target: NamedSharding) -> Any:
            try:
                return jax.device_put(x, target)
            except ValueError:
                # Under `vmap` the batch is in front, and may not divide.
                return jax.device_put(x, NamedSharding(target.mesh, jax.P()))

        return [move(*it) for it in zip(leaves, self.targets, strict=True)]

    def forget_donated(self, leaves: Sequence[Any], placed: Sequence[Any]) -> None:
        """See `give_up`: after the call, which still needs what is shared with the copy."""
        give_up([leaves[i] for i in self.donated], [placed[i] for i in self.donated])


def refuse_deleted(leaves: Sequence[Any], names: Names) -> None:
    """Names the arguments that an earlier call was given to keep: XLA ends the process."""
    gone = [i for i, x in enumerate(leaves) if _is_array(x) and x.is_deleted()]
    if gone:
        told = names.leaves()
        raise RuntimeError(
            f"{len(gone)} arguments of this pmap have been deleted:\n"
            + "\n".join(f"  `{told[i]}`: {leaves[i].aval.str_short()}" for i in gone)
            + "\nA call with donate_argnums takes its arguments' memory. Go on with what it "
            "returned (state = step(state, batch)), or leave donate_argnums out."
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _pool(devices: Devices, count: int) -> list[Any]:
    rest = [d for d in devices.pool if d not in devices.devices]
    return [*devices.devices, *rest][:count]
