"""A step compiled for one structure of its arguments, and what the next step asks of it."""

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxapi, _tree
from ._place import place

_sharding = attrgetter("sharding")
_is_deleted = methodcaller("is_deleted")


@jtu.register_pytree_with_keys_class
class Keywords(dict):
    """The arguments of a step that were given by name; the last one of its `args`."""

    def tree_flatten_with_keys(self):
        names = sorted(self)
        return [(jtu.DictKey(n), self[n]) for n in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))


class Program:
    """A step compiled for one structure of its arguments and one layout of its state."""

    def __init__(
        self,
        body: Callable,
        mesh: Mesh,
        state: _tree.Structure,
        shardings: list[NamedSharding],
        shapes: list[tuple[int, ...]],
        batch: _tree.Structure,
        args: tuple[_tree.Structure, ...],
        *,
        name: str,
        donate: bool,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.state, self.batch, self.args = state, batch, args
        self.shardings, self.shapes = shardings, shapes
        self.seen = shardings
        self.rows_seen: list[Any] | None = None
        replicated = NamedSharding(mesh, P())

        def run(state_arrays, batch_arrays, args_arrays):
            with _jaxapi.tracing_mesh(mesh):
                new, aux = body(
                    state.join(state_arrays),
                    batch.join(batch_arrays),
                    *(s.join(a) for s, a in zip(args, args_arrays, strict=True)),
                )
            out, structure = _next_state(state, state_arrays, new)
            aux_arrays, aux_structure = _tree.split(
                aux, "aux", dynamic=_tree.is_array_or_number
            )
            return out, aux_arrays, _tree.Static((structure, aux_structure))

        run.__name__ = run.__qualname__ = name
        self.jitted = jax.jit(
            run,
            in_shardings=(shardings, None, replicated),
            out_shardings=(shardings, None, None),
            donate_argnums=(0,) if donate else (),
            compiler_options=compiler_options,
        )

    def in_place(self, arrays: Sequence[Any]) -> bool:
        """Whether the state already lies as this program wants it."""
        try:
            have = list(map(_sharding, arrays))
        except AttributeError:
            return False
        if have != self.seen:  # identical objects, as a rule: no `NamedSharding.__eq__`
            if len(have) != len(self.shardings) or not all(map(_lies, arrays, self.shardings)):
                return False
            self.seen = have
        # The same array twice cannot be donated twice.
        return len(set(map(id, arrays))) == len(arrays)

    def bring(self, arrays: Sequence[Any]) -> list[Any]:
        """The state where this program wants it; what lies there already is not copied."""
        met: set[int] = set()
        values, where = [], []
        for x, want in zip(arrays, self.shardings, strict=True):
            # NumPy knows no weak types, which would be compiled for here and never again.
            weak = getattr(x, "weak_type", False) and x.is_fully_addressable
            values.append(np.asarray(x) if weak else x)
            where.append(None if _lies(values[-1], want) and id(x) not in met else want)
            met.add(id(x))
        return place(values, where)


def _lies(x: Any, want: NamedSharding) -> bool:
    return (
        isinstance(x, jax.Array) and x.committed and x.sharding.is_equivalent_to(want, x.ndim)
    )


def refuse_deleted(structure: _tree.Structure, arrays: Sequence[Any], name: str) -> None:
    """Raises for a state that was donated. jax 0.10 ends the process for one."""
    try:
        if True not in map(_is_deleted, arrays):
            return
    except AttributeError:  # not all are JAX's
        pass
    gone = [
        f"  state{path}: {_words(x)}"
        for path, x in zip(structure.paths(), arrays, strict=True)
        if hasattr(x, "is_deleted") and x.is_deleted()
    ]
    if not gone:
        return
    shown = gone[:8] + [f"  and {len(gone) - 8} more"] * (len(gone) > 8)
    raise ValueError(
        f"{len(gone)} of {len(arrays)} arrays of the state were deleted, or donated to an "
        "earlier step, whose new state has their memory:\n"
        + "\n".join(shown)
        + f"\nGo on with the state that {name} returned, or give donate=False."
    )


def _next_state(state: _tree.Structure, before: Sequence[Any], new: Any):
    """The arrays and the structure of a new state that can be the state of the next step."""
    leaves, treedef = jtu.tree_flatten(new)
    if treedef != state.treedef:
        raise _refusal(_tree_problems(state, new, treedef))
    paths, problems, out = state.leaf_paths(), [], []
    for i, a in zip(state.positions, before, strict=True):
        b = _as_array(leaves[i], a.dtype)
        if not _tree.is_array(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"  state{paths[i]}: was {_words(a)}, is {_words(b)}")
        else:
            out.append(_tree.strong(b))
    for i, a in state.static:
        b = leaves[i]
        number = _tree.is_number(a)
        if _tree.is_array(b) or (number and not _same(a, b)):
            became = f"  state{paths[i]}: {_words(a)} became {_words(b)}"
            again = ", and would compile the step anew each time" * _tree.is_number(b)
            problems.append(became + again + f"; make it an array, jnp.asarray({a})" * number)
    if problems:
        raise _refusal(problems)
    return out, _tree.structure(treedef, state.positions, leaves, new, "the new state")


def _as_array(x: Any, dtype: Any) -> Any:
    """A Python number as an array: of `dtype`, if arithmetic with that dtype would keep it."""
    if isinstance(x, bool):
        return jnp.asarray(x)
    if not _tree.is_number(x):
        return x
    arithmetic = jnp.issubdtype(dtype, jnp.number)
    return jnp.asarray(x, jnp.result_type(dtype, x) if arithmetic else None)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)


def _tree_problems(state: _tree.Structure, new: Any, treedef: Any) -> list[str]:
    old = set(state.leaf_paths())
    now = {jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(new)}
    problems = [f"  state{p}: gone in the new state" for p in sorted(old - now)]
    problems += [f"  state{p}: only in the new state" for p in sorted(now - old)]
    return problems or [f"  it was {state.treedef}", f"  it is  {treedef}"]


def _refusal(problems: list[str]) -> ValueError:
    return ValueError(
        "The step must return a state of the structure, shapes and dtypes that it was given, "
        f"so that it can be called again; {len(problems)} differ:\n"
        + "\n".join(problems)
        + "\nReturn (new_state, aux) with the state first, and cast back what changed."
    )


def _words(x: Any) -> str:
    if _tree.is_array(x):
        return f"{x.dtype}{list(x.shape)}"
    if _tree.is_number(x):
        return f"the Python number {x}"
    return f"a {type(x).__name__}"
