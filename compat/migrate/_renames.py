"""What to write instead of a name that is gone or old, where there is an equal.

Only names with the same meaning are here, so that a rename alone is a right repair. What has no
equal gets a hint in `HINTS`: the sentence that a finding ends with.
"""

import dataclasses
from typing import Literal

from compat.migrate._removed import REMOVED
from compat.migrate._versions import parse_version

Mode = Literal["compat", "jax", "meshdp"]


@dataclasses.dataclass(frozen=True)
class Rename:
    """`old` may be replaced by `new` without a change of meaning."""

    old: str
    new: str
    """The dotted name to write at a use."""
    imported: str = ""
    """The dotted name to import in place of `old`; `new` if empty."""
    module: str = ""
    """A module that must be imported for `new` to be found, beside its first part."""

    @property
    def import_from(self) -> tuple[str, str]:
        module, _, name = (self.imported or self.new).rpartition(".")
        return module, name


def _trees() -> list[Rename]:
    names = ["flatten", "leaves", "map", "structure", "transpose", "unflatten"]
    plain = [Rename(f"jax.tree_{n}", f"jax.tree.{n}", f"jax.tree_util.tree_{n}") for n in names]
    many = [
        Rename(f"{module}.tree_multimap", "jax.tree.map", "jax.tree_util.tree_map")
        for module in ("jax", "jax.tree_util")
    ]
    return [*plain, *many, Rename("jax.treedef_is_leaf", "jax.tree_util.treedef_is_leaf")]


def _core() -> list[Rename]:
    # The ones of `jax.core` that `jax.extend.core` has; each is checked against JAX by a test.
    names = "ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var jaxpr_as_fun".split()
    moved = [
        Rename(f"jax.core.{n}", f"jax.extend.core.{n}", module="jax.extend.core") for n in names
    ]
    errors = "TracerArrayConversionError TracerIntegerConversionError UnexpectedTracerError"
    return [
        *moved,
        *(Rename(f"jax.core.{n}", f"jax.errors.{n}") for n in errors.split()),
        Rename("jax.core.InconclusiveDimensionOperation",
               "jax.errors.InconclusiveDimensionOperation"),
        Rename("jax.core.get_aval", "jax.typeof"),
        Rename("jax.abstract_arrays.ShapedArray", "jax.core.ShapedArray"),
        Rename("jax.ShapedArray", "jax.core.ShapedArray"),
    ]  # fmt: skip


def _arrays_and_meshes() -> list[Rename]:
    arrays = """jax.interpreters.pxla.ShardedDeviceArray jax.interpreters.xla.DeviceArray
        jax.numpy.DeviceArray jax.random.KeyArray
        jax.random.PRNGKeyArray jax.experimental.global_device_array.GlobalDeviceArray
        jax.experimental.array.Array jax.pxla.ShardedDeviceArray jax.xla.DeviceArray"""
    specs = """jax.experimental.PartitionSpec jax.experimental.pjit.PartitionSpec
        jax.interpreters.pxla.PartitionSpec jax.experimental.sharding.PartitionSpec"""
    meshes = """jax.experimental.maps.Mesh jax.interpreters.pxla.Mesh
        jax.experimental.global_device_array.Mesh"""
    constraint = """jax.experimental.with_sharding_constraint
        jax.experimental.pjit.with_sharding_constraint"""
    return [
        *(Rename(n, "jax.Array") for n in arrays.split()),
        *(Rename(n, "jax.sharding.PartitionSpec") for n in specs.split()),
        *(Rename(n, "jax.sharding.Mesh") for n in meshes.split()),
        *(Rename(n, "jax.lax.with_sharding_constraint") for n in constraint.split()),
        Rename("jax.experimental.sharding.NamedSharding", "jax.sharding.NamedSharding"),
        Rename("jax.experimental.sharding.MeshPspecSharding", "jax.sharding.NamedSharding"),
        Rename("jax.sharding.XLACompatibleSharding", "jax.sharding.Sharding"),
        Rename("jax.sharding.use_mesh", "jax.set_mesh"),
    ]


def _numpy_and_others() -> list[Rename]:
    numpy = {
        "alltrue": "all", "cumproduct": "cumprod", "fix": "trunc",
        "product": "prod", "round_": "round", "row_stack": "vstack", "sometrue": "any",
        "trapz": "trapezoid",
    }  # fmt: skip
    ours = [Rename(f"jax.numpy.{old}", f"jax.numpy.{new}") for old, new in numpy.items()]
    return [
        *ours,
        Rename("jax.host_count", "jax.process_count"),
        Rename("jax.host_id", "jax.process_index"),
        Rename("jax.host_ids", "jax.process_indices"),
        Rename("jax.config.config", "jax.config"),
        Rename("jax.partial", "functools.partial"),
        Rename("jax.nn.normalize", "jax.nn.standardize"),
        Rename("jax.scipy.linalg.tril", "jax.numpy.tril"),
        Rename("jax.scipy.linalg.triu", "jax.numpy.triu"),
        Rename("jax.experimental.optimizers", "jax.example_libraries.optimizers",
               module="jax.example_libraries.optimizers"),
        Rename("jax.experimental.stax", "jax.example_libraries.stax",
               module="jax.example_libraries.stax"),
        Rename("jax.linear_util", "jax.extend.linear_util", module="jax.extend.linear_util"),
        Rename("jax.lib.xla_bridge.get_backend", "jax.extend.backend.get_backend",
               module="jax.extend.backend"),
        Rename("jax.lib.xla_bridge.device_count", "jax.device_count"),
        Rename("jax.lib.xla_bridge.local_device_count", "jax.local_device_count"),
        Rename("jax.lib.xla_bridge.host_count", "jax.process_count"),
        Rename("jax.lib.xla_bridge.host_id", "jax.process_index"),
        Rename("jax.lib.xla_bridge.process_count", "jax.process_count"),
        Rename("jax.lib.xla_bridge.process_index", "jax.process_index"),
        Rename("jax.experimental.enable_x64", "jax.enable_x64"),
    ]  # fmt: skip


def _compat() -> list[Rename]:
    flax = ["replicate", "unreplicate", "prefetch_to_device"]
    return [
        Rename("jax.device_put_replicated", "compat.device_put_replicated"),
        Rename("jax.device_put_sharded", "compat.device_put_sharded"),
        Rename("jax.pmap", "compat.pmap"),
        Rename("jax.soft_pmap", "compat.pmap"),
        *(Rename(f"flax.jax_utils.{n}", f"compat.{n}") for n in flax),
    ]


SAME = {r.old: r for r in (*_trees(), *_core(), *_arrays_and_meshes(), *_numpy_and_others())}
"""Renames to something JAX (or Python) has; they hold in every mode."""

COMPAT = {r.old: r for r in _compat()}
"""Renames to something that only `compat` has."""

HINTS = {
    "jax.core.axis_frame": "Use compat.in_pmap(name) to ask whether an axis is bound, "
    "jax.lax.axis_size(name) for its size.",
    "jax.core.raise_to_shaped": "Drop the call: every abstract value is a shaped one now.",
    "jax.experimental.host_callback": "Use jax.experimental.io_callback, jax.pure_callback or "
    "jax.debug.print.",
    "jax.experimental.loops": "Use jax.lax.fori_loop, while_loop or scan.",
    "jax.experimental.export": "Use the public module jax.export.",
    "jax.experimental.maps": "Use compat.pmap or jax.shard_map in place of xmap, and "
    "jax.sharding.Mesh for the mesh.",
    "jax.interpreters.pxla.thread_resources": "Pass the mesh along, or ask "
    "jax.sharding.get_abstract_mesh() under jax.set_mesh.",
    "jax.lax.tie_in": "Replace tie_in(x, y) by y.",
    "jax.lax.pvary": "Use jax.lax.pcast(x, axes, to='varying').",
    "jax.lib.xla_client": "Use jax.Device for the type of a device, jax.extend for the rest.",
    "jax.numpy.in1d": "Use jax.numpy.isin(x, y).ravel().",
    "jax.numpy.msort": "Use jax.numpy.sort(x, axis=0).",
    "jax.ops.index_add": "Write x.at[index].add(y).",
    "jax.ops.index_max": "Write x.at[index].max(y).",
    "jax.ops.index_min": "Write x.at[index].min(y).",
    "jax.ops.index_mul": "Write x.at[index].multiply(y).",
    "jax.ops.index_update": "Write x.at[index].set(y).",
    "jax.random.shuffle": "Use jax.random.permutation(key, x, independent=True).",
    "jax.scipy.special.sph_harm": "Use jax.scipy.special.sph_harm_y; its arguments are in "
    "another order.",
    "jax.sharding.PmapSharding": "Use jax.sharding.NamedSharding over a one-axis mesh.",
    "jax.sharding.PositionalSharding": "Use jax.sharding.NamedSharding over a mesh.",
    "jax.xla_computation": "Use jax.jit(f).lower(*args).compiler_ir('hlo').",
}  # fmt: skip
"""Advice for names without an equal."""

REMOVED_IN: dict[str, tuple[int, int]] = {
    f"{module}.{name}": parse_version(version)
    for module, versions in REMOVED.items()
    for version, names in versions.items()
    for name in names.split()
} | {"jax.config.config": (0, 4)}
"""Each removed qualified name with the first JAX version without it."""


def removed(name: str) -> str | None:
    """The removed name that `name` is or begins with, the most specific first.

    `jax.experimental.maps.Mesh` gives `jax.experimental.maps`.
    """
    while name:
        if name in REMOVED_IN:
            return name
        name = name.rpartition(".")[0]
    return None


def hint(name: str) -> str:
    """Advice for `name`, or for the nearest thing above it that has some."""
    part = name
    while part:
        if part in SAME:
            return f"Write {SAME[part].new}{name[len(part) :]}."
        if part in HINTS:
            return HINTS[part]
        part = part.rpartition(".")[0]
    return "It has no public equal: see the JAX changelog for what took its place."
