"""What a run is, written down once at its start."""

import dataclasses
import importlib.metadata
import math
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from .. import _tree

PACKAGES = ("meshdp", "jax", "jaxlib", "numpy", "optax", "equinox", "orbax-checkpoint")


def describe(step: Any, arrays: list[Any], config: Any) -> dict[str, Any]:
    """The configuration, mesh, layout, versions, device kind, command and git commit."""
    return {
        "config": as_plain(config),
        "mesh": describe_mesh(step.mesh),
        "layout": describe_layout(step, arrays),
        "versions": {"python": platform.python_version(), **versions()},
        "processes": jax.process_count(),
        "command": sys.argv,
        **git(),
    }


def describe_mesh(mesh: Any) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "axes": {a: n for a, n in mesh.shape.items() if n > 1},
        "devices": int(mesh.devices.size),
        "device_kind": device.device_kind,
        "platform": device.platform,
    }


def describe_layout(step: Any, arrays: list[Any]) -> dict[str, Any]:
    """How the state lies: counts, and bytes in all (global) and on one device."""
    layout = getattr(step, "_layout", None)
    nbytes = lambda x, shape: math.prod(shape) * getattr(x.dtype, "itemsize", 4)
    return {
        "rule": "fsdp()" if layout is None else repr(layout),
        "leaves": len(arrays),
        "numbers": sum(x.size for x in arrays),
        "bytes": sum(nbytes(x, x.shape) for x in arrays),
        "bytes_per_device": sum(nbytes(x, x.sharding.shard_shape(x.shape)) for x in arrays),
        "replicated_leaves": sum(x.sharding.is_fully_replicated for x in arrays),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def git() -> dict[str, Any]:
    """The commit of the program's repository and whether files differ from it."""
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or ".").resolve()
    folder = main.parent if main.is_file() else Path.cwd()

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, timeout=5
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {"git_commit": None, "git_changed": None}
    return {
        "git_commit": commit,
        "git_changed": bool(ask("status", "--porcelain", "--untracked-files=no")),
    }


def as_plain(x: Any) -> Any:
    """As JSON can say it: dataclasses and namespaces as dicts, anything unknown by its repr."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: as_plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {str(k): as_plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [as_plain(v) for v in x]
    if x is None or isinstance(x, (str, int, float, bool)):
        return x
    if type(x).__name__ in ("Namespace", "SimpleNamespace"):
        return as_plain(vars(x))
    return repr(x)


def state_arrays(state: Any) -> list[Any]:
    return _tree.split(state, "state")[0]
