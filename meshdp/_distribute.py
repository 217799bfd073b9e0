"""`@distributed`: a step written for one device, on every device of a mesh."""

import functools
import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxapi, _tree
from ._layout import Layout, fsdp, replicate, specs
from ._mesh import make_mesh
from ._place import place, shard_batch
from ._program import Keywords, Program, refuse_deleted
from ._step_options import check_options, check_step, describe

BATCH_AXES = ("data", "fsdp")
BATCH = P(BATCH_AXES)

log = logging.getLogger("meshdp")

_sharding = attrgetter("sharding")


class Distributed:
    """A step on a mesh; made by `distributed`, which documents it."""

    def __init__(
        self,
        step: Callable,
        *,
        mesh: Mesh | None,
        layout: Layout | None,
        batch: P,
        donate: bool,
    ):
        # Without the attributes of a callable object, which could be called as ours.
        functools.update_wrapper(self, step, updated=())
        self._step, self._layout = step, layout
        self._mesh = None if mesh is None else _jaxapi.auto_mesh(mesh.devices, mesh.axis_names)
        self._batch, self._donate = batch, donate
        self._programs: dict[Any, list[Program]] = {}
        self._last: Program | None = None

    def _name(self) -> str:
        return getattr(self, "__qualname__", None) or repr(self._step)

    def _body(self, state, batch, *args):
        keywords = args[-1] if args and isinstance(args[-1], Keywords) else {}
        out = self._step(state, batch, *args[: len(args) - bool(keywords)], **keywords)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise ValueError(
                f"{self._name()} must return (state, aux), a tuple of two, but it returned "
                f"{describe(out)}. Write `return new_state, loss`."
            )
        return out

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on.

        **Raises:**

        - `ValueError`: if none was given and no state has been seen to choose one for.
        """
        if self._mesh is None:
            raise ValueError(
                f"{self._name()} was given no mesh, and chooses one when it first sees a "
                "state. Call .init(...) first, or give distributed(mesh=...)."
            )
        return self._mesh

    @_jaxapi.with_no_mesh_set
    def init(self, make_state: Callable, *args: Any) -> Any:
        """Makes the state on the mesh, each leaf in its place from the start.

        `make_state(*args)` is traced for its shapes, which get their specs from the layout,
        and then compiled with those as its output shardings. No leaf is ever whole on one
        device unless its spec replicates it.

        **Arguments:**

        - `make_state`: returns the state; written for one device.
        - `args`: its arguments: arrays and keys are traced, anything else is static.

        **Returns:**

        The state: global arrays, committed to the mesh.
        """
        arrays, given = _tree.split(args, "args")
        kept: list[_tree.Structure] = []

        def make(arrays):
            state = self.with_arrays(make_state(*given.join(arrays)))
            out, structure = _tree.split(state, "state")
            kept[:] = [structure]
            return list(map(_tree.strong, out))

        shapes = jax.eval_shape(make, arrays)
        structure = kept[0]
        self._choose_mesh(shapes)
        shardings = self._state_shardings(structure, shapes)
        arrays = place(arrays, NamedSharding(self.mesh, P()))

        def make_on_mesh(arrays):
            with _jaxapi.tracing_mesh(self.mesh):
                return make(arrays)

        # Donated never: the caller keeps the key.
        return structure.join(jax.jit(make_on_mesh, out_shardings=shardings)(arrays))

    def shardings(self, state: Any) -> Any:
        """The `NamedSharding` of every array of a state, or of its shapes.

        Leaves that are not arrays get `None`. Nothing is allocated.
        """
        state = self.with_arrays(state)
        arrays, structure = _tree.split(state, "state")
        self._choose_mesh(arrays)
        out: list[Any] = [None] * (len(structure.positions) + len(structure.static))
        for i, s in zip(
            structure.positions, self._state_shardings(structure, arrays), strict=True
        ):
            out[i] = s
        return jtu.tree_unflatten(structure.treedef, out)

    def with_arrays(self, state: Any) -> Any:
        """The state as the step sees it: its Python numbers are arrays, as in `jax.jit`.

        Those of an `equinox.Module` are its settings, and stay. So does a state of arrays.
        """
        return _tree.numbers_as_arrays(state, "state")

    def _state_shardings(self, structure: _tree.Structure, shapes) -> list[NamedSharding]:
        tree = structure.join(shapes)
        try:
            found = self._specs(tree)
        except ValueError as e:
            e.add_note(f"This was the state of {self._name()} on {_sizes(self.mesh)}.")
            raise
        flat = [s for s in spec_leaves(tree, found) if s is not None]
        return [NamedSharding(self.mesh, s) for s in flat]

    def _specs(self, tree):
        layout = self._layout or (fsdp() if "fsdp" in self.mesh.shape else replicate())
        return specs(tree, layout, self.mesh.shape)

    def _choose_mesh(self, shapes) -> None:
        if self._mesh is not None:
            return
        devices = jax.devices()
        state = sum(_nbytes(x) for x in shapes)
        limit = _jaxapi.memory_limit(devices[0])
        # A step holds the state, and gradients and activations about as large again.
        axis = "data" if 2 * state <= limit else "fsdp"
        self._mesh = make_mesh(data=-1) if axis == "data" else make_mesh(fsdp=-1)
        why = "fits" if axis == "data" else "does not fit"
        log.info(
            "%s: all %d devices on %r, since twice the state (%s) %s in the memory of one "
            "device (%s); give mesh= to choose.",
            self._name(),
            len(devices),
            axis,
            _size(2 * state),
            why,
            _size(limit),
        )

    @_jaxapi.with_no_mesh_set
    def __call__(self, state: Any, batch: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        program, arrays, batch_arrays, args_arrays = self._prepare(state, batch, args, keywords)
        refuse_deleted(program.state, arrays, self._name())
        if not program.in_place(arrays):
            program = self._fitting(program, arrays)
            arrays = program.bring(arrays)
        out, aux, static = program.jitted(arrays, batch_arrays, args_arrays)
        structure, aux_structure = static.value
        return self._join(structure, out), aux_structure.join(aux)

    def _join(self, structure: _tree.Structure, arrays):
        return structure.join(arrays)

    @_jaxapi.with_no_mesh_set
    def lower(self, state: Any, batch: Any, *args: Any, **keywords: Any) -> jax.stages.Lowered:
        """As `jax.jit(step).lower`: takes arrays or shapes, and donates nothing."""
        program, arrays, batch_arrays, args_arrays = self._prepare(state, batch, args, keywords)
        program = self._fitting(program, arrays)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for x, s in zip(arrays, program.shardings, strict=True)
        ]
        return program.jitted.lower(shapes, batch_arrays, args_arrays)

    def _prepare(self, state, batch, args, keywords):
        if keywords:
            args = (*args, Keywords(keywords))
        if not _jaxapi.nothing_traced():
            raise TypeError(
                f"{self._name()} is a step on a mesh and was called inside jit, grad, vmap or "
                "a loop of JAX. Call it from plain Python, where it is compiled by itself; "
                "step.lower(state, batch) has its program and the shapes of what it returns."
            )
        last = self._last
        arrays, s = _tree.split(state, "state", like=last and last.state)
        if last is None or s is not last.state:
            given, state = state, self.with_arrays(state)
            if state is not given:
                arrays, s = _tree.split(state, "state", like=last and last.state)
        numbers = _tree.is_array_or_number
        rows, b = _tree.split(batch, "batch", dynamic=numbers, like=last and last.batch)
        if not args:
            more, a = (), ()
        else:
            like = last.args if last and len(last.args) == len(args) else (None,) * len(args)
            parts = [
                _tree.split(
                    x,
                    "keywords" if isinstance(x, Keywords) else f"argument {i}",
                    dynamic=numbers,
                    like=k,
                )
                for i, (x, k) in enumerate(zip(args, like, strict=True), 2)
            ]
            more, a = tuple(p[0] for p in parts), tuple(p[1] for p in parts)
        if last is None or s is not last.state or b is not last.batch or a != last.args:
            known = self._programs.setdefault((s, b, a), [])
            last = self._last = known[0] if known else self._program(known, s, arrays, b, a)
        if more and not _any_shape(more):
            more = place(more, NamedSharding(self.mesh, P()), share=True)
        return last, arrays, self._place_batch(last, rows), more

    def _fitting(self, program: Program, arrays) -> Program:
        """The program whose layout was made for a state of these shapes."""
        shapes = [x.shape for x in arrays]
        if shapes == program.shapes:
            return program
        s, b, a = program.state, program.batch, program.args
        known = self._programs[s, b, a]
        found = next((p for p in known if p.shapes == shapes), None)
        self._last = found or self._program(known, s, arrays, b, a)
        return self._last

    def _program(self, known: list[Program], s, arrays, b, a) -> Program:
        self._choose_mesh(arrays)
        program = Program(
            self._body,
            self.mesh,
            s,
            self._state_shardings(s, arrays),
            [x.shape for x in arrays],
            b,
            a,
            name=getattr(self, "__name__", "step"),
            donate=self._donate,
            compiler_options=self._compiler_options(),
        )
        known.append(program)
        return program

    def _compiler_options(self) -> dict[str, Any] | None:
        return None

    def _place_batch(self, program: Program, rows):
        seen = program.rows_seen
        if seen is not None and all(isinstance(x, jax.Array) for x in rows):
            if list(map(_sharding, rows)) == seen:
                return rows
        if _any_shape([rows]):
            where = lambda x: NamedSharding(self.mesh, P(*self._batch[: len(x.shape)]))
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))
            return [shape(x) if _tree.is_array(x) else x for x in rows]
        # What is not an array of JAX's can change under a step that has not run yet: copied.
        share = all(isinstance(x, jax.Array) for x in rows)
        batch = shard_batch(program.batch.join(rows), self.mesh, self._batch, share=share)
        leaves = jtu.tree_leaves(batch)
        placed = [leaves[i] for i in program.batch.positions]
        if all(isinstance(x, jax.Array) for x in placed):
            program.rows_seen = list(map(_sharding, placed))
        return placed


def distributed(
    step: Callable | None = None,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    batch: P = BATCH,
    donate: bool = True,
) -> Any:
    """Runs a step that was written for one device on every device of a mesh.

    ```python
    @meshdp.distributed
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
    ```

    The step sees the whole (global) batch, as on one device, and its result equals one
    device's; the compiler splits the work and places the collectives. Inside,
    `jax.lax.with_sharding_constraint(x, P(...))` takes bare specs.

    **Arguments:**

    - `step`: any function `step(state, batch, *args, **keywords) -> (state, aux)`. The state
        may be any pytree. Its arrays and numbers, and those of the other arguments, are
        traced; every other leaf (functions, strings, flags, the numbers in an
        `equinox.Module` of the state) is static, and only a change of those, or of a shape or
        dtype, compiles anew.
    - `mesh`: from `make_mesh`, or any other, whose axes are then taken as `Auto`. If `None`,
        all devices go on `"data"` when twice the state
        fits in the memory of one, else on `"fsdp"`; a line logged by `"meshdp"` says which.
    - `layout`: says how the state is split. If `None`, `fsdp()`, which on a mesh without an
        `"fsdp"` axis replicates.
    - `batch`: the spec of each array of the batch (global shape; its leading dimension must
        divide).
    - `donate`: whether the memory of the state that is passed in becomes that of the state
        that comes out. Arrays that must first be moved onto the mesh are copied: the caller's
        own stay alive.

    **Returns:**

    A callable with the same arguments, and `.init(make_state, *args)`, `.lower(...)`,
    `.mesh`, `.shardings(state)` and `.__wrapped__`.

    **Raises:**

    - `ValueError`: when called, if a leaf cannot be laid out as asked, if the batch does not
        divide, if the state was donated before, or if the step returns a state of another
        structure, shape or dtype.
    """
    check_options(mesh, layout, batch)
    if step is None:
        return functools.partial(
            distributed, mesh=mesh, layout=layout, batch=batch, donate=donate
        )
    check_step(step)
    return Distributed(step, mesh=mesh, layout=layout, batch=batch, donate=donate)


def _any_shape(parts) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for part in parts for x in part)


def spec_leaves(tree: Any, found: Any) -> list[P | None]:
    """The spec of each leaf of a tree, of those that `specs` found; `None` for no array."""
    out: list[P | None] = []
    jax.tree.map(lambda _, s: out.append(s), tree, found)
    return out


def _sizes(mesh: Mesh) -> str:
    sizes = ", ".join(f"{a}={n}" for a, n in mesh.shape.items() if n > 1)
    return f"a mesh of {sizes or 'one device'}"


def _nbytes(x) -> int:
    return x.size * getattr(x.dtype, "itemsize", 4)


def _size(n: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
