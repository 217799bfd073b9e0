"""The report of one compiled step: everything that is known about it, as data."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshdp import _jaxapi, _tree
from meshdp._distribute import Distributed
from meshdp.report._devices import Device, device_of, slow_axes
from meshdp.report._faults import check_options, report_fields
from meshdp.report._hlo import (
    Collective,
    Traffic,
    mesh_sizes,
    module_collectives,
    positions,
    program_text,
    total,
)
from meshdp.report._hlo_text import Module, parse
from meshdp.report._least import Least
from meshdp.report._loops import trip_count
from meshdp.report._memory import Memory, Remedy, read_memory, remedies
from meshdp.report._pipelines import Pipeline, read_pipelines
from meshdp.report._time import Bound, Scaled, bound, scaling, utilisation
from meshdp.report._train_least import train_least
from meshdp.report._work import Work, work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a compiled step moves, holds and computes.

    Collectives, memory and work are read from the program. `bound` and `scaling` are
    predicted from them and from the speeds of `device`; only `seconds`, if given, is a
    measured time of the step.

    `print(report)` gives plain text; `rich.print(report)` and a notebook show it richly;
    `to_html` writes one file, `to_json` keeps it for `diff`.
    """

    name: str
    jax_version: str
    mesh: dict[str, int]
    device_ids: tuple[int, ...]
    """Ids of the devices in the order of the mesh."""

    slow_axes: tuple[str, ...]
    """Axes whose traffic takes the network."""

    collectives: tuple[Collective, ...]
    memory: Memory
    work: Work
    """Per device and call."""

    layers: int
    """Trip count of the longest loop: the layers of a scanned model; 1 without loops."""

    device: Device | None = None
    """Speeds; `None` where nothing is known of this kind of device."""

    bound: Bound | None = None
    scaling: tuple[Scaled, ...] = ()
    least: Least | None = None
    """The least traffic possible, for steps that say what they reduce and gather."""

    pipelines: tuple[Pipeline, ...] = ()
    """Those of `meshdp.parallel`, with the bubble predicted and counted."""

    seconds: float | None = None
    """A measured time of one call."""

    @property
    def traffic(self) -> Traffic:
        """All collectives together; per device and call."""
        return total(self.collectives)

    @property
    def utilisation(self) -> float | None:
        """Model flops utilisation, a fraction, from the measured `seconds`."""
        if self.seconds is None or self.device is None:
            return None
        return utilisation(self.work, self.device, self.seconds)

    def remedies(self, limit_bytes: int) -> tuple[Remedy, ...]:
        """What would bring the step under `limit_bytes` per device; () if it fits."""
        return remedies(self.memory, limit_bytes, self.mesh, self.layers)

    def __str__(self) -> str:
        from meshdp.report._text import to_text

        return to_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from meshdp.report._text import to_rich

        yield from to_rich(self)

    def _repr_html_(self) -> str:
        from meshdp.report._html import fragment

        return fragment(self)

    def show(self) -> None:
        """Prints the report: richly in a terminal where `rich` is installed, else plainly."""
        import sys

        from meshdp.report._text import show

        show(self, sys.stdout)

    def to_html(self, path: Any) -> None:
        """Writes one self-contained file, which needs no network."""
        from meshdp.report._html import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self))

    def to_json(self) -> str:
        """The report as JSON text; `Report.from_json` gives it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Reads what `to_json` wrote.

        **Raises:**

        - `ValueError`: if the text is anything else.
        """
        return _rebuild(cls, report_fields(text, cls))


def _rebuild(kind: Any, value: Any) -> Any:
    """Dataclasses and tuples from the dicts and lists that JSON made of them."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name in value]
        return kind(**{name: _rebuild(hints[name], value[name]) for name in names})  # pyright: ignore
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and value is not None:
        return tuple(_rebuild(args[0], v) for v in value)
    if origin in (typing.Union, types.UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if value is None else _rebuild(inner, value)
    return value


def report_compiled(
    compiled: Any,
    mesh: Mesh | None = None,
    *,
    name: str = "step",
    device: Device | None = None,
    roles: Mapping[str, str] | None = None,
    seconds: float | None = None,
    least: Least | None = None,
    names: Sequence[str] | None = None,
) -> Report:
    """Reports on any `jax.stages.Compiled`: of `jit`, `shard_map` or `compat.pmap`.

    ```python
    compiled = jax.jit(step).lower(state, batch).compile()
    print(meshdp.report_compiled(compiled, mesh))
    ```

    **Arguments:**

    - `compiled`: what `.lower(*args).compile()` returned.
    - `mesh`: the mesh it was compiled for; `None` takes it from the program's shardings.
    - `name`: a title.
    - `device`: speeds to predict times with. By default those of the data sheet; a CPU is
        measured, which takes about a second.
    - `roles`: patterns (regular expressions, searched in the path of an argument) that say
        which is "parameters", "optimizer state", "batch" or "other"; by default guessed
        from the usual names.
    - `seconds`: a measured time of one call, for the utilisation.
    - `least`: the least possible traffic, if it is known.
    - `names`: what to call the arrays that go in, in order; by default as JAX does.

    **Raises:**

    - `ValueError`: if no mesh is given and none is found, or it is not the program's.
    - `ValueError`: if `roles` has a pattern or a role that there is not, or a speed or
        time is not above 0.
    - `TypeError`: if `compiled` is not a compiled program, or `mesh` or `device` is not
        one. All faults of the options are named at once.
    """
    if not hasattr(compiled, "input_shardings"):
        raise TypeError(
            "Expected a compiled step, as from jax.jit(f).lower(*args).compile(); got "
            f"{type(compiled).__name__}. For a step that is not compiled yet, use "
            "meshdp.report(step, *args)."
        )
    check_options(mesh, device, roles, seconds)
    mesh = mesh if mesh is not None else mesh_of(compiled)
    module = parse(program_text(compiled))
    sizes = mesh_sizes(mesh)
    memory = read_memory(compiled, module, mesh, roles, names)
    found = module_collectives(module, sizes, positions(compiled, mesh))
    found = _renamed(found, module, memory)
    counted = work(module)
    slow = slow_axes(mesh)
    device = device if device is not None else device_of(mesh)
    return Report(
        name=name,
        jax_version=_jaxapi.VERSION,
        mesh=sizes,
        device_ids=tuple(d.id for d in mesh.devices.flat),
        slow_axes=slow,
        collectives=found,
        memory=memory,
        work=counted,
        layers=_longest_loop(module),
        device=device,
        bound=bound(counted, found, device, slow) if device else None,
        scaling=scaling(counted, found, device, sizes, slow=slow) if device else (),
        least=least,
        pipelines=read_pipelines(module),
        seconds=seconds,
    )


def report(
    step: Any,
    *args: Any,
    mesh: Mesh | None = None,
    device: Device | None = None,
    roles: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Report:
    """Reports on a step: every collective with its axis and bytes, memory, work and time.

    ```python
    print(meshdp.report(step, state, batch))
    meshdp.report(step, state, batch).to_html("step.html")
    ```

    The step is compiled, not run: `args` may be arrays or `jax.ShapeDtypeStruct`s, and are
    not donated.

    **Arguments:**

    - `step`: what `meshdp.distributed` or `make_train_step` returned, any function of
        `jax.jit` or `compat.pmap`, a plain function, or a `jax.stages.Compiled`.
    - `args`: the arguments of one call.
    - `mesh`, `device`, `roles`, `seconds`: as for `report_compiled`.
    """
    compiled = compile_step(step, args)
    mesh = mesh if mesh is not None else mesh_of_step(step, compiled)
    done = report_compiled(
        compiled,
        mesh,
        name=getattr(step, "__name__", None) or type(step).__name__,
        device=device,
        roles=roles,
        seconds=seconds,
        names=_argument_names(step, args),
    )
    return dataclasses.replace(done, least=train_least(step, args, done.collectives))


def compile_step(step: Any, args: Sequence[Any]) -> Any:
    """A `jax.stages.Compiled` of whatever a step is.

    **Raises:**

    - `TypeError`: if `step` is no step, or `args` is not a tuple.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            "The arguments of the step come as a tuple, such as (state, batch); got "
            f"{type(args).__name__}."
        )
    if hasattr(step, "input_shardings"):
        return step
    if not callable(step):
        raise TypeError(
            f"Expected a step, such as meshdp.distributed returns; got {type(step).__name__}."
        )
    compiled: Any = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args).compile()
    # Equinox wraps what JAX compiled.
    return compiled if hasattr(compiled, "input_shardings") else compiled.compiled


def mesh_of_step(step: Any, compiled: Any) -> Mesh:
    """The step's own mesh, else that of its program."""
    mesh = getattr(step, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else mesh_of(compiled)


def _argument_names(step: Any, args: Sequence[Any]) -> list[str] | None:
    """Our steps hand lists of arrays to `jax.jit`; these are the paths they came from."""
    if not isinstance(step, Distributed):
        return None
    names = []
    for k, arg in enumerate(args):
        dynamic = _tree.is_array_or_number if k else _tree.is_array
        title = ("state", "batch")[k] if k < 2 else f"args[{k - 2}]"
        arg = arg if k else step.with_arrays(arg)
        _, structure = _tree.split(arg, title, dynamic=dynamic)
        names += [title + path for path in structure.paths()]
    return names


def _renamed(
    found: tuple[Collective, ...], module: Module, memory: Memory
) -> tuple[Collective, ...]:
    """Collectives that move an argument name it by the path that the report uses."""
    parameters = module.main.parameters
    if len(parameters) != len(memory.leaves):
        return found
    paths = {parameters[k].op_name: leaf.path for k, leaf in enumerate(memory.leaves)}
    return tuple(
        dataclasses.replace(c, argument=paths.get(c.argument, c.argument)) if c.argument else c
        for c in found
    )


def mesh_of(compiled: Any) -> Mesh:
    """The mesh of the program's own shardings."""
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for sharding in leaves:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    raise ValueError(
        "No argument or result of this program has a NamedSharding, so its mesh is not known. "
        "Pass it: report_compiled(compiled, mesh)."
    )


def _longest_loop(module: Module) -> int:
    trips = [
        trip_count(module, c, i) or 1
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode == "while"
    ]
    return max(trips, default=1)
