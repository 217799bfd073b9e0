"""What each device holds: arguments, outputs, temporaries; leaf by leaf, and what to do."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from meshdp.report._hlo_text import Module

WORTH_SPLITTING = 2**16
"""Elements; a smaller leaf costs more to gather than to keep."""

_ROLES = {
    "optimizer state": {"opt_state", "optim_state", "optimizer", "optimizer_state"},
    "parameters": {"params", "param", "parameters", "weights", "model"},
}
_BATCH = {"batch", "inputs", "x", "y", "data", "images", "labels", "tokens"}
# Copies along these are what the axis means, not an oversight.
_MEANT_TO_COPY = ("data", "seq", "stage")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array that goes into the step."""

    path: str
    role: str
    """"parameters", "optimizer state", "batch" or "other"."""

    shape: tuple[int, ...]
    """Of the whole array."""

    dtype: str

    bytes: int
    """Of the whole array."""

    device_bytes: int
    """On each device."""

    spec: str
    """How it is laid out, or "" where its sharding has no name."""

    tiles: tuple[int, ...]
    """How many pieces each dimension is cut into."""

    holders: tuple[tuple[int, ...], ...]
    """For each piece (row-major), the positions in the mesh that hold it."""

    could_split: str = ""
    """A split that would fit a replicated leaf, and what it saves on each device."""

    lost_donation: bool = False
    """Donated, but no output could take its memory."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device. `None`: this backend does not say."""

    argument_bytes: int
    output_bytes: int | None
    alias_bytes: int
    """Outputs that live in the memory of donated arguments."""

    temp_bytes: int | None
    code_bytes: int | None
    leaves: tuple[Leaf, ...]

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporaries; what is aliased counts once."""
        rest = (self.output_bytes or 0) + (self.temp_bytes or 0) + (self.code_bytes or 0)
        return self.argument_bytes + rest - self.alias_bytes

    @property
    def by_role(self) -> dict[str, int]:
        """Bytes of the arguments on each device, by role."""
        sums: dict[str, int] = {}
        for leaf in self.leaves:
            sums[leaf.role] = sums.get(leaf.role, 0) + leaf.device_bytes
        return sums


def read_memory(
    compiled: Any,
    module: Module,
    mesh: Any,
    roles: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
) -> Memory:
    """Reads the memory of a `jax.stages.Compiled` laid out over `mesh`."""
    leaves = read_leaves(compiled, module, mesh, roles, names)
    analysis = compiled.memory_analysis()
    read = lambda key: getattr(analysis, f"{key}_size_in_bytes", None)
    arguments = read("argument")
    return Memory(
        argument_bytes=sum(a.device_bytes for a in leaves) if arguments is None else arguments,
        output_bytes=read("output"),
        alias_bytes=read("alias") or 0,
        temp_bytes=read("temp"),
        code_bytes=read("generated_code"),
        leaves=leaves,
    )


def read_leaves(
    compiled: Any,
    module: Module,
    mesh: Any,
    roles: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[Leaf, ...]:
    """Every array that goes in, in order; those that the program never uses are left out.

    `names`: what to call them; by default what JAX calls them.
    """
    infos, treedef = jtu.tree_flatten_with_path(compiled.args_info)
    # `flatten_up_to` keeps the `None` that JAX puts where an argument is not used.
    shardings = treedef.flatten_up_to(compiled.input_shardings)
    given = list(names) if names and len(names) == len(infos) else [""] * len(infos)
    used = [
        (name, p, i, s)
        for name, (p, i), s in zip(given, infos, shardings, strict=True)
        if s is not None
    ]
    parameters = module.main.parameters
    named = len(used) == len(parameters)
    aliased = aliased_parameters(module)
    where = {device: i for i, device in enumerate(mesh.devices.flat)}
    found = []
    for number, (name, path, info, sharding) in enumerate(used):
        parameter = parameters[number] if named else None
        name = name or (parameter.op_name if parameter is not None else "")
        name = name or _argument_name(path)
        tiles, holders = pieces(sharding, info.shape, where)
        shape = tuple(info.shape)
        local = math.prod(-(-n // t) for n, t in zip(shape, tiles, strict=True))
        size = parameter.arrays[0] if parameter is not None and parameter.arrays else None
        # A PRNG key is several words; only the program's own parameter says how many.
        local_bytes = size.bytes if size else local * _item_bytes(info.dtype)
        role = _role(name, roles or {})
        found.append(
            Leaf(
                path=name,
                role=role,
                shape=shape,
                dtype=str(info.dtype),
                bytes=local_bytes * math.prod(tiles),
                device_bytes=local_bytes,
                spec=_spec(sharding),
                tiles=tiles,
                holders=holders,
                could_split=could_split(shape, local_bytes, sharding, role),
                lost_donation=bool(info.donated) and named and number not in aliased,
            )
        )
    return tuple(found)


def _item_bytes(dtype: Any) -> int:
    return getattr(np.dtype(dtype) if not hasattr(dtype, "itemsize") else dtype, "itemsize", 0)


def _argument_name(path: tuple[Any, ...]) -> str:
    """`args[0]['w']` from the path within `(args, kwargs)`."""
    return ("args" if path[0].idx == 0 else "kwargs") + jtu.keystr(path[1:])


def _spec(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return ""
    return f"P({', '.join(map(repr, sharding.spec))})"


def _role(path: str, roles: Mapping[str, str]) -> str:
    for pattern, role in roles.items():
        if re.search(pattern, path):
            return role
    words = re.findall(r"[A-Za-z_]\w*", path)
    for role, names in _ROLES.items():
        if names & set(words):
            return role
    return "batch" if words and words[0] in _BATCH else "other"


def aliased_parameters(module: Module) -> set[int]:
    """Numbers of the parameters whose memory an output takes over."""
    start = module.header.find("input_output_alias={")
    if start < 0:
        return set()
    return {int(n) for n in re.findall(r"\}: \((\d+),", module.header[start:])}


def pieces(
    sharding: Any, shape: tuple[int, ...], where: Mapping[Any, int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """How an array is cut, and who holds each piece: `Leaf.tiles` and `Leaf.holders`."""
    held: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        start = tuple(s.indices(n)[0] for s, n in zip(index, shape, strict=True))
        held.setdefault(start, []).append(where.get(device, -1))
    tiles = tuple(len({start[d] for start in held}) for d in range(len(shape)))
    return tiles, tuple(tuple(sorted(held[start])) for start in sorted(held))


def could_split(shape: tuple[int, ...], local_bytes: int, sharding: Any, role: str) -> str:
    """Names a split over an unused axis that divides the leaf, or returns ""."""
    if not isinstance(sharding, NamedSharding) or role == "batch":
        return ""
    if math.prod(shape) < WORTH_SPLITTING:
        return ""
    spec = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    taken = [(s if isinstance(s, tuple) else (s,)) if s else () for s in spec]
    sizes = sharding.mesh.shape
    local = [n // math.prod(sizes[a] for a in t) for n, t in zip(shape, taken, strict=True)]
    used = {a for t in taken for a in t}
    free = [a for a, n in sizes.items() if n > 1 and a not in used and a not in _MEANT_TO_COPY]
    for axis in free:
        fits = [d for d, n in enumerate(local) if n % sizes[axis] == 0 and n]
        if fits:
            at = max(fits, key=lambda d: local[d])
            saved = local_bytes - local_bytes // sizes[axis]
            return f"dimension {at} over {axis}={sizes[axis]}, saving {saved} bytes per device"
    return ""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One change and the bytes per device that it is predicted to leave."""

    change: str
    predicted_bytes: int
    fits: bool
    why: str


def remedies(
    memory: Memory, limit_bytes: int, mesh_sizes: Mapping[str, int], layers: int
) -> tuple[Remedy, ...]:
    """What would bring a step under a limit; nothing if it is under it already.

    Predicted, not measured:

    - fsdp: parameters and optimizer state that are copied over the data axes are split
      over them. A gathered layer at a time comes on top and is left out.
    - accumulation in k microbatches: temporaries shrink to 1/k, but not below one copy of
      the gradients.
    - remat of each of `layers` layers: temporaries shrink to 2/sqrt(layers) (Chen et al.,
      2016, "Training deep nets with sublinear memory cost"), again not below the gradients.
    """
    total, temp = memory.total_bytes, memory.temp_bytes or 0
    if total <= limit_bytes:
        return ()
    found = []

    def add(change: str, saved: int, why: str) -> None:
        left = total - max(0, saved)
        found.append(Remedy(change, left, left <= limit_bytes, why))

    state = [a for a in memory.leaves if a.role != "batch"]
    copies = math.prod(n for a, n in mesh_sizes.items() if a in ("data", "fsdp"))
    saved = 0
    for leaf in state:
        if math.prod(leaf.shape) >= WORTH_SPLITTING and copies > 1:
            held = max(len(h) for h in leaf.holders)
            ways = math.gcd(held, copies)
            saved += leaf.device_bytes - leaf.device_bytes // ways
    if saved:
        add(f"fsdp={copies} instead of copies", saved, "state split over the data axes")
    gradients = sum(a.device_bytes for a in state if a.role in ("parameters", "other"))
    floor = min(temp, gradients)
    for k in (2, 4, 8, 16, 32):
        add(f"accumulation in {k}", temp - max(temp // k, floor), "a smaller microbatch")
        if found[-1].fits:
            break
    if layers > 4:
        kept = max(int(temp * 2 / math.sqrt(layers)), floor)
        add(f"remat of each of {layers} layers", temp - kept, "only block inputs are kept")
    return tuple(found)
