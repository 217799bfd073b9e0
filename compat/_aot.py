"""`pmap(f).lower(...).compile()`, which takes and gives what the call takes and gives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from compat._axes import Names
from compat._entry import Entry


class Lowered:
    """A mapped function lowered for one set of shapes; otherwise as `jax.stages.Lowered`."""

    def __init__(self, entry: Entry, leaves: Sequence[Any], function: str):
        shapes, own = [], []
        shardings = entry.shardings if entry.border is None else entry.global_shardings
        for x, sharding in zip(leaves, shardings, strict=True):
            shape = jnp.shape(x)
            weak = getattr(x, "weak_type", isinstance(x, (int, float, complex)))
            if entry.border is not None:
                shape = entry.border.global_shape(shape, sharding.spec)
            # float64 of NumPy is float32 here, as in any call.
            dtype = jax.dtypes.canonicalize_dtype(getattr(x, "dtype", jnp.result_type(x)))
            shapes.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))
            own.append((jnp.shape(x), dtype))
        self._entry, self._function = entry, function
        self._own = tuple(own)
        self._lowered = entry.jitted.lower(*shapes)

    def compile(self, compiler_options: dict | None = None) -> "Compiled":
        compiled = self._lowered.compile(compiler_options)
        return Compiled(compiled, self._entry, self._function, self._own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._lowered, name)


class Compiled:
    """A compiled mapped function; otherwise as `jax.stages.Compiled`.

    Calls leave static arguments out. Arguments may live anywhere, as with `pmap` itself.
    """

    def __init__(
        self, compiled: Any, entry: Entry, function: str, own: tuple[tuple[Any, Any], ...]
    ):
        self._compiled, self._entry, self._function = compiled, entry, function
        self._own = own  # (shape, dtype) of each leaf, on this process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        entry = self._entry
        if treedef != entry.treedef:
            raise ValueError(
                f"This pmap was compiled for arguments of the structure\n  {entry.treedef}\n"
                f"but was called with\n  {treedef}\nLower it again for these arguments."
            )
        names = Names(lambda: None, None, args, kwargs)
        self._check(leaves, names)
        placed = entry.place(leaves, names, self._function)
        if entry.border is None:
            out = self._compiled(*placed)
        else:
            placed_ = entry.border.to_global(placed, entry.global_shardings)
            out = entry.border.to_local(self._compiled(*placed_))
        entry.forget_donated(leaves, placed)
        return out

    def _check(self, leaves: Sequence[Any], names: Names) -> None:
        got = []
        for x in leaves:
            dtype = jax.dtypes.canonicalize_dtype(getattr(x, "dtype", jnp.result_type(x)))
            got.append((jnp.shape(x), dtype))
        faults = [
            f"  `{name}` is {a[1]}{list(a[0])}, not {b[1]}{list(b[0])}"
            for name, a, b in zip(names.leaves(), got, self._own, strict=True)
            if a != b
        ]
        if faults:
            raise ValueError(
                f"This pmap was compiled for other arguments; {len(faults)} differ:\n"
                + "\n".join(faults)
                + "\nLower it again for these arguments."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled, name)
