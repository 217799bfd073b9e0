"""`@distributed`: a step written for one device, on every device of a mesh."""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxapi, _tree
from ._layout import Layout, fsdp, specs
from ._mesh import make_mesh
from ._place import place, shard_batch

BATCH = P(("data", "fsdp"))

log = logging.getLogger("meshdp")

_sharding = attrgetter("sharding")


class Program:
    """A step compiled for one structure of its arguments."""

    def __init__(self, step: "Distributed", state, state_shapes, batch, args):
        self.state, self.batch, self.args = state, batch, args
        self.shardings = step._state_shardings(state, state_shapes)
        self.seen = self.shardings
        self.rows_seen: list[Any] | None = None
        replicated = NamedSharding(step.mesh, P())

        def run(state_arrays, batch_arrays, args_arrays):
            with _jaxapi.tracing_mesh(step.mesh):
                new, aux = step._body(
                    state.join(state_arrays),
                    batch.join(batch_arrays),
                    *(s.join(a) for s, a in zip(args, args_arrays, strict=True)),
                )
            out, structure = _tree.split(new, "the new state", dynamic=_tree.is_array_or_number)
            out = _checked(state, state_arrays, structure, out)
            aux_arrays, aux_structure = _tree.split(
                aux, "aux", dynamic=_tree.is_array_or_number
            )
            return out, aux_arrays, _tree.Static((structure, aux_structure))

        run.__name__ = run.__qualname__ = getattr(step, "__name__", "step")
        self.jitted = jax.jit(
            run,
            in_shardings=(self.shardings, None, replicated),
            out_shardings=(self.shardings, None, None),
            donate_argnums=(0,) if step._donate else (),
        )

    def in_place(self, arrays: Sequence[Any]) -> bool:
        """Whether the state already lies as this program wants it."""
        try:
            have = list(map(_sharding, arrays))
        except AttributeError:
            return False
        if have == self.seen:  # identical objects, as a rule: no `NamedSharding.__eq__`
            return True
        same = all(
            isinstance(x, jax.Array) and x.committed and h.is_equivalent_to(want, x.ndim)
            for x, h, want in zip(arrays, have, self.shardings, strict=True)
        )
        if same:
            self.seen = have
        return same


def _checked(state: _tree.Structure, before, structure: _tree.Structure, after):
    """The new state's arrays, if it can be the state of the next step."""
    problems = []
    if structure.treedef != state.treedef or structure.positions != state.positions:
        old, new = set(state.paths()), set(structure.paths())
        problems = [f"  state{p}: gone in the new state" for p in sorted(old - new)]
        problems += [f"  state{p}: only in the new state" for p in sorted(new - old)]
        problems = problems or [f"  it was {state.treedef}", f"  it is  {structure.treedef}"]
    else:
        for path, a, b in zip(state.paths(), before, after, strict=True):
            b = jax.numpy.asarray(b)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                problems.append(
                    f"  state{path}: was {a.dtype}{list(a.shape)}, is {b.dtype}{list(b.shape)}"
                )
        for (i, a), (_, b) in zip(state.static, structure.static, strict=True):
            if isinstance(a, _tree.NUMBERS) and not isinstance(a, bool) and a != b:
                problems.append(
                    f"  leaf {i} of the state: the Python number {a} became {b}, and would "
                    f"compile the step anew each time; make it an array, jnp.asarray({a})"
                )
    if problems:
        raise ValueError(
            "The step must return a state of the structure, shapes and dtypes that it was "
            f"given, so that it can be called again; {len(problems)} differ:\n"
            + "\n".join(problems)
            + "\nReturn (new_state, aux) with the state first, and cast back what changed."
        )
    # A weakly typed leaf would trace the next call anew.
    return [jax.lax.convert_element_type(x, x.dtype) if _weak(x) else x for x in after]


def _weak(x) -> bool:
    return getattr(x, "weak_type", False)


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
        functools.update_wrapper(self, step)
        self._step, self._mesh, self._layout = step, mesh, layout
        self._batch, self._donate = batch, donate
        self._programs: dict[Any, Program] = {}
        self._last: Program | None = None

    def _name(self) -> str:
        return getattr(self, "__qualname__", None) or repr(self._step)

    def _body(self, state, batch, *args):
        out = self._step(state, batch, *args)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise ValueError(
                f"{self._name()} must return (state, aux), a tuple of two, but it returned "
                f"{_describe(out)}. Write `return new_state, loss`."
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
            out, structure = _tree.split(make_state(*given.join(arrays)), "state")
            kept[:] = [structure]
            return out

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
        arrays, structure = _tree.split(state, "state")
        self._choose_mesh(arrays)
        out: list[Any] = [None] * (len(structure.positions) + len(structure.static))
        for i, s in zip(
            structure.positions, self._state_shardings(structure, arrays), strict=True
        ):
            out[i] = s
        return jtu.tree_unflatten(structure.treedef, out)

    def _state_shardings(self, structure: _tree.Structure, shapes) -> list[NamedSharding]:
        tree = structure.join(shapes)
        layout = self._layout or fsdp()
        try:
            found = self._specs(tree, layout)
        except ValueError as e:
            e.add_note(f"This was the state of {self._name()} on {_sizes(self.mesh)}.")
            raise
        flat = [s for s in spec_leaves(tree, found) if s is not None]
        return [NamedSharding(self.mesh, s) for s in flat]

    def _specs(self, tree, layout):
        return specs(tree, layout, self.mesh.shape)

    def _choose_mesh(self, shapes) -> None:
        if self._mesh is not None:
            return
        devices = jax.devices()
        state = sum(_nbytes(x) for x in shapes)
        limit = _jaxapi.memory_limit(devices[0])
        # A step holds the state, and gradients and activations about as large again.
        axis = "data" if 2 * state <= limit else "fsdp"
        self._mesh = make_mesh(**{axis: len(devices)})
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

    def __call__(self, state: Any, batch: Any, *args: Any) -> tuple[Any, Any]:
        program, arrays, batch_arrays, args_arrays = self._prepare(state, batch, args)
        if not program.in_place(arrays):
            arrays = place(arrays, program.shardings)
        out, aux, static = program.jitted(arrays, batch_arrays, args_arrays)
        structure, aux_structure = static.value
        return self._join(structure, out), aux_structure.join(aux)

    def _join(self, structure: _tree.Structure, arrays):
        return structure.join(arrays)

    def lower(self, state: Any, batch: Any, *args: Any) -> jax.stages.Lowered:
        """As `jax.jit(step).lower`: takes arrays or shapes, allocates and donates nothing."""
        program, arrays, batch_arrays, args_arrays = self._prepare(state, batch, args)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for x, s in zip(arrays, program.shardings, strict=True)
        ]
        return program.jitted.lower(shapes, batch_arrays, args_arrays)

    def _prepare(self, state, batch, args):
        last = self._last
        arrays, s = _tree.split(state, "state", like=last and last.state)
        numbers = _tree.is_array_or_number
        rows, b = _tree.split(batch, "batch", dynamic=numbers, like=last and last.batch)
        if not args:
            more, a = (), ()
        else:
            like = last.args if last and len(last.args) == len(args) else (None,) * len(args)
            parts = [
                _tree.split(x, f"argument {i}", dynamic=numbers, like=k)
                for i, (x, k) in enumerate(zip(args, like, strict=True), 2)
            ]
            more, a = tuple(p[0] for p in parts), tuple(p[1] for p in parts)
        if last is None or s is not last.state or b is not last.batch or a != last.args:
            key = (s, b, a)
            last = self._programs.get(key)
            if last is None:
                self._choose_mesh(arrays)
                last = self._programs[key] = Program(self, s, arrays, b, a)
            self._last = last
        if more:
            more = place(more, NamedSharding(self.mesh, P()), share=True)
        return last, arrays, self._place_batch(last, rows), more

    def _place_batch(self, program: Program, rows):
        seen = program.rows_seen
        if seen is not None and all(isinstance(x, jax.Array) for x in rows):
            if list(map(_sharding, rows)) == seen:
                return rows
        if rows and isinstance(rows[0], jax.ShapeDtypeStruct):
            sharding = NamedSharding(self.mesh, self._batch)
            return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in rows]
        # What is not an array of JAX's can change under a step that has not run yet: copied.
        share = all(isinstance(x, jax.Array) for x in rows)
        batch = shard_batch(program.batch.join(rows), self.mesh, self._batch, share=share)
        placed = _tree.split(batch, "batch")[0]
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

    - `step`: any function `step(state, batch, *args) -> (state, aux)`. The state may be any
        pytree. Its arrays, and the arrays and numbers of the other arguments, are traced;
        every other leaf (functions, strings, flags) is static, and only a change of those, or
        of a shape or dtype, compiles anew.
    - `mesh`: from `make_mesh`. If `None`, all devices go on `"data"` when twice the state
        fits in the memory of one, else on `"fsdp"`; a line logged by `"meshdp"` says which.
    - `layout`: says how the state is split. If `None`, `fsdp()`, which on a mesh without an
        `"fsdp"` axis replicates.
    - `batch`: the spec of each array of the batch (global shape; its leading dimension must
        divide).
    - `donate`: whether the memory of the state that is passed in becomes that of the state
        that comes out. A state that must first be moved onto the mesh is copied: the caller's
        own arrays stay alive.

    **Returns:**

    A callable with the same arguments, and `.init(make_state, *args)`, `.lower(...)`,
    `.mesh`, `.shardings(state)` and `.__wrapped__`.

    **Raises:**

    - `ValueError`: when called, if a leaf cannot be laid out as asked, if the batch does not
        divide, or if the step returns a state of another structure, shape or dtype.
    """
    if step is None:
        return functools.partial(
            distributed, mesh=mesh, layout=layout, batch=batch, donate=donate
        )
    if not callable(step):
        raise TypeError(
            f"distributed takes a function step(state, batch, ...), not {_describe(step)}. "
            "Options go by name: @meshdp.distributed(mesh=mesh)."
        )
    check_options(mesh, layout, batch)
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise TypeError(
            f"{step.__qualname__} must be a plain function, so that JAX can trace it."
        )
    return Distributed(step, mesh=mesh, layout=layout, batch=batch, donate=donate)


def spec_leaves(tree: Any, found: Any) -> list[P | None]:
    """The spec of each leaf of a tree, of those that `specs` found; `None` for no array."""
    out: list[P | None] = []
    jax.tree.map(lambda _, s: out.append(s), tree, found)
    return out


def check_options(mesh: Any, layout: Any, batch: Any) -> None:
    """Refuses arguments of the wrong type, all at once."""
    problems = []
    if mesh is not None and not isinstance(mesh, Mesh):
        problems.append(f"  mesh: {mesh!r}; it takes a Mesh: meshdp.make_mesh(data=4, fsdp=2)")
    if layout is not None and not isinstance(layout, Layout):
        problems.append(f"  layout: {layout!r}; it takes a Layout: meshdp.fsdp()")
    if not isinstance(batch, P):
        problems.append(f'  batch: {batch!r}; it takes a PartitionSpec: P(("data", "fsdp"))')
    if problems:
        raise TypeError("These options have the wrong type:\n" + "\n".join(problems))


def _describe(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a {type(x).__name__}"


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
