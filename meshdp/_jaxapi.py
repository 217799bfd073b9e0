"""The one module that knows which JAX this is.

Everything that differs between versions of JAX, or that JAX does not promise to keep, is
called from here and nowhere else.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.extend.core as jax_core
import numpy as np
from jax._src import core as src_core
from jax._src import distributed, source_info_util, xla_bridge
from jax._src.array import ArrayImpl
from jax.core import Tracer
from jax.experimental import mesh_utils
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh

VERSION = jax.__version__


def auto_mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    """A mesh with every axis `Auto`, said aloud: JAX's default differs by version."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def topology_mesh(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Devices of one slice in an array of `shape`, whose last dimensions get the fastest
    links. The platform's own order where JAX knows its topology."""
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:  # a physical dimension must serve two axes
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def hybrid_mesh(
    inner: Sequence[int], outer: Sequence[int], devices: Sequence[Any], *, by_process: bool
) -> np.ndarray:
    """As `topology_mesh` for several slices: `outer` counts the slices along each dimension,
    `inner` the devices of one slice."""
    make = functools.partial(
        mesh_utils.create_hybrid_device_mesh,
        inner,
        outer,
        devices,
        process_is_granule=by_process,
    )
    try:
        return make()
    except NotImplementedError:  # as above
        return make(allow_split_physical_axes=True)


def shard_map(
    f: Callable,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Collection[str] = (),
) -> Callable:
    """As `jax.shard_map` with `check_vma=False`.

    Without the check, collectives differentiate as under `jax.pmap` and `jax.vmap` with an
    axis name: the transpose of `psum` is `psum`.
    """
    kwargs = {} if mesh is None else {"mesh": mesh}
    return jax.shard_map(
        f,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axis_names),
        check_vma=False,
        **kwargs,
    )


def tracing_mesh(mesh: Mesh):
    """A context in which bare `PartitionSpec`s mean this mesh, legal while tracing."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def manual_axes() -> frozenset[str]:
    """The mesh axes that are manual where this is called (inside `shard_map`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.manual_axes)


def automatic_axes() -> frozenset[str]:
    """The mesh axes that the compiler partitions where this is called."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset() if mesh.empty else frozenset(mesh.axis_names) - set(mesh.manual_axes)


def low_sums_abort(mesh: AbstractMesh) -> bool:
    """Whether a `psum` of bfloat16 beside automatic axes of this mesh ends the process.

    XLA for CPU: "Invalid binary instruction opcode copy", seen on 0.10.2 and 0.12.0.1.
    """
    device = mesh.abstract_device
    return (device.platform if device else jax.default_backend()) == "cpu"


def nested_axes_must_follow() -> bool:
    """Whether a `shard_map` inside another may only take axes that come later in the mesh.

    Otherwise XLA aborts the process ("Manual axes must be sorted by mesh axis index"): seen on
    0.12.0.1, not on 0.10.2. Delete when the newest JAX compiles it.
    """
    return jax.__version_info__ >= (0, 11)


def keeps_barriers(platform: str) -> dict[str, Any] | None:
    """Compiler options without which `jax.checkpoint` saves no memory outside loops.

    XLA of jax 0.10 for CPU takes its barriers out before it merges equal computations, and so
    what is computed again with what was kept. Delete when the floor is 0.11.
    """
    if platform == "cpu" and jax.__version_info__ < (0, 11):
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return None


def memory_limit(device: Any) -> int:
    """The bytes that one device can hold; the host's memory, shared out, for the CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // jax.local_device_count(device.platform)


# The key-value store that `jax.distributed` keeps on process 0: messages between hosts that
# need no device, and so do not wait for what the devices are doing.


def join_processes(*args: Any, **kwargs: Any) -> bool:
    """As `jax.distributed.initialize`; `False` if it found no address and no cluster."""
    try:
        jax.distributed.initialize(*args, **kwargs)
    except ValueError as e:
        if str(e) != "coordinator_address should be defined.":
            raise
        return False
    return True


def store_set(key: str, value: str) -> None:
    distributed.global_state.client.key_value_set(key, value)  # type: ignore[union-attr]


def store_set_once(key: str, value: str) -> None:
    """As `store_set`; does nothing if some process has set the key already."""
    try:
        store_set(key, value)
    except jax.errors.JaxRuntimeError as e:
        if "ALREADY_EXISTS" not in str(e):
            raise


def store_get(key: str, seconds: float) -> str | None:
    """Waits until some process has set the key; `None` if none does in time."""
    client: Any = distributed.global_state.client
    try:
        return client.blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as e:
        if "DEADLINE_EXCEEDED" not in str(e):
            raise
        return None


def store_delete(key: str) -> None:
    distributed.global_state.client.key_value_delete(key)  # type: ignore[union-attr]


# Running a traced program equation by equation (as `jax.core.eval_jaxpr` does).


def program(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, as `(jaxpr, consts)`. jax 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many operands of a `scan` equation are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # jax 0.12 keeps the operands' tree instead: (consts, carry, xs).
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def has_subprogram(eqn: Any) -> bool:
    """Whether an equation contains a program: a loop, a branch, a custom derivative."""
    return next(iter(jax_core.jaxprs_in_params(eqn.params)), None) is not None


def subprograms(eqn: Any) -> list[Any]:
    """The programs inside an equation: the body of a loop, branches, what `jit` wraps."""
    kinds = (jax_core.Jaxpr, jax_core.ClosedJaxpr)
    return [
        v
        for p in eqn.params.values()
        for v in (p if isinstance(p, (tuple, list)) else (p,))
        if isinstance(v, kinds)
    ]


def equation_for(closed: Any, eqn: Any, results: Sequence[Any]) -> Any:
    """An equation of a jaxpr that makes these of its results only, on the same variables.

    What it does inside for the others is left out: a `shard_map` of two matrix products may
    come back with one.
    """
    reads = list(dict.fromkeys(a for a in eqn.invars if not is_literal(a)))
    alone = program(closed)[0].replace(
        constvars=[], invars=reads, outvars=list(results), eqns=[eqn]
    )
    (found,) = dce_jaxpr(alone, [True] * len(results))[0].eqns
    return found


def eqn_context(eqn: Any):
    """The context an equation was traced in: its name stack, source line and settings."""
    stack = contextlib.ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    stack.enter_context(source_info_util.user_context(traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    return stack


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Applies an equation's primitive to other operands."""
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


# What `compat` asks of JAX.


def at_top_level() -> bool:
    """Whether nothing is being traced and no mesh is set (`jax.set_mesh`)."""
    return src_core.trace_state_clean() and jax.sharding.get_abstract_mesh().empty


def nothing_traced() -> bool:
    """Whether this runs eagerly: not under `jit`, `grad`, `vmap` or `shard_map`."""
    return src_core.trace_state_clean()


def with_no_mesh_set(f: Callable) -> Callable:
    """`f`, called as if the user had set no mesh (`jax.set_mesh`).

    Under one JAX compiles for nothing but its devices, and its axes mean something in
    everything that is traced.
    """

    @functools.wraps(f)
    def call(*args: Any, **keywords: Any) -> Any:
        if at_top_level() or not nothing_traced():
            return f(*args, **keywords)
        with jax.set_mesh(None):  # type: ignore[arg-type]
            return f(*args, **keywords)

    return call


# `x.sharding`, which is a Python property, at half its price. Raises `AttributeError` for
# tracers and what is no array. A dispatch of 500 leaves asks 500 times.
sharding_of = attrgetter("_sharding" if hasattr(ArrayImpl, "_sharding") else "sharding")


def untied(x: jax.Array) -> jax.Array:
    """The same single-device array, uncommitted: JAX may mix it with arrays anywhere."""
    sharding = jax.sharding.SingleDeviceSharding(next(iter(x.devices())))
    return ArrayImpl(x.aval, sharding, [x], committed=False)  # type: ignore[arg-type]


def backend_is_up() -> bool:
    """Whether JAX has looked for its devices already, after which their number is fixed."""
    return xla_bridge.backends_are_initialized()


def set_from_environment(variable: str, value: str) -> None:
    """Gives one of JAX's options the value of its environment variable (`JAX_ENABLE_X64`), as
    `import jax` does. Does nothing for other variables."""
    name = variable.lower()
    if name not in jax.config.values:
        return
    kind = jax.config.meta[name][0]
    if kind is bool:
        jax.config.update(name, value.lower() in ("1", "on", "t", "true", "y", "yes"))
    else:
        jax.config.update(name, kind(value) if kind in (int, float) else value)


def unsharded(x: Any) -> Any:
    """A traced array whole on every device, if its type says that it is not (`Explicit`)."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    if not isinstance(x, Tracer) or not any(spec):
        return x
    return jax.sharding.reshard(x, jax.P(*(None,) * x.ndim))


def names_given(jaxpr: Any) -> set[str]:
    """The names that `jax.ad_checkpoint.checkpoint_name` gives to values of a program."""
    found: set[str] = set()
    for eqn in program(jaxpr)[0].eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for inner in subprograms(eqn):
            found |= names_given(inner)
    return found


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a program, or one inside it, applies the primitive of that name."""
    return any(
        eqn.primitive.name == primitive or any(uses(p, primitive) for p in subprograms(eqn))
        for eqn in program(jaxpr)[0].eqns
    )
