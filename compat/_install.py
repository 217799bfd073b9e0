"""The names that JAX removed, back in `jax`; and `jax.pmap` is ours."""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from compat import _flax, _place
from compat._pmap import pmap

_MISSING = object()

HINT = (
    "Results of maps over different devices do not mix on this JAX. Bring each together first: "
    "compat.local(y) for all rows, compat.unreplicate(y) for one replica's."
)


def host_id(backend: str | None = None) -> int:
    """As `jax.process_index`, under the name it had."""
    return jax.process_index(backend)


def host_count(backend: str | None = None) -> int:
    """As `jax.process_count`, under the name it had."""
    return jax.process_count(backend)


def host_ids(backend: str | None = None) -> list[int]:
    """The index of every process, under the name it had."""
    return list(range(jax.process_count(backend)))


def _setup_tpu(*args: Any, **kwargs: Any) -> None:
    print("compat: jax.tools.colab_tpu.setup_tpu() is no longer needed; JAX finds the devices.")


def _colab_tpu() -> types.ModuleType:
    module = types.ModuleType("jax.tools.colab_tpu", "Stands in for the module JAX removed.")
    module.setup_tpu = _setup_tpu  # type: ignore[attr-defined]
    return module


def _config() -> types.ModuleType:
    module = types.ModuleType("jax.config", "Stands in for the module JAX removed.")
    module.config = jax.config  # type: ignore[attr-defined]
    return module


REMOVED: dict[str, Callable] = {
    "device_put_replicated": _place.device_put_replicated,
    "device_put_sharded": _place.device_put_sharded,
    "host_count": host_count,
    "host_id": host_id,
    "host_ids": host_ids,
    "tree_all": jtu.tree_all,
    "tree_flatten": jtu.tree_flatten,
    "tree_leaves": jtu.tree_leaves,
    "tree_map": _flax.tree_map,
    "tree_multimap": _flax.tree_multimap,
    "tree_reduce": jtu.tree_reduce,
    "tree_structure": jtu.tree_structure,
    "tree_transpose": jtu.tree_transpose,
    "tree_unflatten": jtu.tree_unflatten,
}
"""What `install` puts into `jax`, besides `pmap`, `tools.colab_tpu` and `config.config`."""


_active: list["Installed"] = []  # in the order of `install`


class Installed:
    """Undoes `install`: call `uninstall()`, or use it in a `with` statement."""

    def __init__(self, before: list[tuple[Any, str, Any]]):
        self._before = before
        _active.append(self)

    def uninstall(self) -> None:
        """Makes `jax` what it was, unless another `install` is still wanted. A second call does
        nothing."""
        if self not in _active:
            return
        i = _active.index(self)
        _active.remove(self)
        if i < len(_active):
            # Whoever installed later will restore what we found, not what we put there.
            _active[i]._before = self._before
            return
        for where, name, value in reversed(self._before):
            if isinstance(where, dict):
                where.pop(name, None) if value is _MISSING else where.update({name: value})
            elif value is _MISSING:
                if name in vars(where):
                    delattr(where, name)
            else:
                setattr(where, name, value)

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            add_hint(error)
        self.uninstall()


def install() -> Installed:
    """Puts the names that JAX removed back into `jax`, and `compat.pmap` in place of
    `jax.pmap`, for the whole process.

    Never done by importing `compat`. Names that a module has already taken from `jax`
    (`from jax import pmap`) stay what they are: install first.

    **Returns:**

    A handle: `handle.uninstall()` restores `jax` exactly, and so does leaving a `with`.
    """
    before: list[tuple[Any, str, Any]] = []

    def put(where: Any, name: str, value: Any) -> None:
        held = where if isinstance(where, dict) else vars(where)
        before.append((where, name, held.get(name, _MISSING)))
        if isinstance(where, dict):
            where[name] = value
        else:
            setattr(where, name, value)

    for name in ("jax.tools", "jax.tools.colab_tpu", "jax.config"):
        before.append((sys.modules, name, sys.modules.get(name, _MISSING)))
    before.append((jax, "tools", vars(jax).get("tools", _MISSING)))
    tools = importlib.import_module("jax.tools")
    put(tools, "colab_tpu", module := _colab_tpu())
    sys.modules["jax.tools.colab_tpu"] = module
    # For `from jax.config import config`; the attribute `jax.config` stays what it is.
    sys.modules["jax.config"] = _config()
    put(jax, "pmap", pmap)
    for name, function in REMOVED.items():
        put(jax, name, function)
    put(jtu, "tree_multimap", _flax.tree_multimap)

    shown = sys.excepthook

    def excepthook(kind: type, error: BaseException, traceback: Any) -> None:
        add_hint(error)
        shown(kind, error, traceback)

    put(sys, "excepthook", excepthook)
    return Installed(before)


def add_hint(error: BaseException) -> None:
    """Tells whoever mixed results of maps over different devices what to do."""
    if "incompatible devices for jitted computation" in str(error):
        if HINT not in getattr(error, "__notes__", ()):
            error.add_note(HINT)
