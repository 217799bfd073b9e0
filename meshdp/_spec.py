"""Arithmetic on `PartitionSpec`s. Pure: no mesh, no device."""

from collections.abc import Collection

from jax.sharding import PartitionSpec as P


def entries(spec: P, ndim: int) -> tuple[tuple[str, ...], ...]:
    """For each of `ndim` dimensions the mesh axes that split it, slowest first."""
    split = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return split + ((),) * (ndim - len(split))


def from_entries(dims: Collection[tuple[str, ...]]) -> P:
    """The inverse of `entries`, without trailing `None`s."""
    out = [None if not d else d[0] if len(d) == 1 else d for d in dims]
    while out and out[-1] is None:
        out.pop()
    return P(*out)


def axes_of(spec: P) -> frozenset[str]:
    """Every mesh axis that a spec names."""
    return frozenset(a for d in entries(spec, len(spec)) for a in d)


def keep(spec: P, axes: Collection[str]) -> P:
    """The spec with only these axes."""
    return from_entries([tuple(a for a in d if a in axes) for d in entries(spec, len(spec))])
