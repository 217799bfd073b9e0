"""A pmap-style step in mesh style, its body unchanged."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jax_core
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compat._bodies import Frame, frames
from compat._collectives import explain
from compat._move import give_up, moved
from meshdp import _jaxapi
from meshdp._layout import Layout, replicate, specs
from meshdp._mesh import make_mesh

ROWS = ("data", "fsdp")


def global_view(
    step: Callable,
    axis_name: Hashable = "batch",
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable:
    """Runs a step written for pmap under `jit`, on a mesh, as one replica that sees it all.

    `pmean` and the like find the axis, of size 1, and have nothing left to do: means over the
    global batch are what `pmean` computed from the shares' means, as long as these are equally
    large. What a step does with its replica's index, number or own random key is another
    matter: there is one replica now.

    ```python
    step = compat.global_view(step, "batch", donate_argnums=0)  # instead of pmap(step, "batch")
    state, loss = step(state, batch)                            # no device dimension anywhere
    ```

    **Arguments:**

    - `step`: `step(state, *batches)`, the function that was given to `pmap`; or what `pmap`
        returned for it.
    - `axis_name`: the name that its collectives use.
    - `mesh`: by default all devices on `"data"`.
    - `layout`: where the state goes; by default a copy on every device.
    - `batch_argnums`: the arguments whose leading dimension (the *global* batch) is split over
        `("data", "fsdp")`; by default all but the first. A leaf that does not divide, such as
        a scalar or a key, is copied to every device: this changes nothing but speed.
    - `static_argnums`, `donate_argnums`: as in `jax.jit`.

    **Returns:**

    A function of global arguments with global results. A result (or its first item) that looks
    like the state keeps the state's layout. `.lower` as in `jax.jit`, `.mesh`.

    **Raises:**

    - `NameError`: if the step uses an axis of another name.
    """
    body = getattr(step, "__wrapped__", step) if hasattr(step, "lower") else step
    mesh = make_mesh() if mesh is None else mesh
    layout = replicate() if layout is None else layout
    static = _indices(static_argnums)
    batches = None if batch_argnums is None else _indices(batch_argnums)
    rows = int(np.prod([mesh.shape[a] for a in ROWS]))

    def where(i: int, arg: Any) -> Any:
        if i not in batches if batches is not None else i == 0:
            shapes = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(np.shape(x), _dtype(x)), arg)
            chosen = specs(shapes, layout, mesh.shape)
            is_spec = lambda s: isinstance(s, P)
            return jtu.tree_map(lambda s: NamedSharding(mesh, s), chosen, is_leaf=is_spec)
        split = lambda x: np.ndim(x) and np.shape(x)[0] and np.shape(x)[0] % rows == 0
        return jtu.tree_map(lambda x: NamedSharding(mesh, P(ROWS) if split(x) else P()), arg)

    def bind(args: Sequence[Any], kwargs: dict) -> Any:
        """The step's result where the axis has one replica."""
        dynamic = [None if i in static else a for i, a in enumerate(args)]
        leaves, tree = jtu.tree_flatten((dynamic, kwargs))

        def one(*leaves: Any) -> Any:
            dynamic, kwargs = jtu.tree_unflatten(tree, leaves)
            mine = [args[i] if i in static else a for i, a in enumerate(dynamic)]
            frames().append(Frame(axis_name, True, 1, (), 0))
            try:
                return body(*mine, **kwargs)
            except NameError as e:
                better = explain(e, [(f.name, f.given) for f in frames()])
                raise better.with_traceback(e.__traceback__) from None
            finally:
                frames().pop()

        traced = jax.make_jaxpr(one, axis_env=[(axis_name, 1)], return_shape=True)
        program, shapes = traced(*leaves)
        # Nothing gets a dimension of 1 but what comes from the axis itself: a `cond` must not
        # become a select. Only the rule of `all_to_all` is wrong for what is not mapped.
        mapped = _jaxapi.uses(program, "all_to_all")
        out = jax.vmap(
            jax_core.jaxpr_as_fun(program),
            in_axes=0 if mapped else None,
            axis_size=1,
            axis_name=axis_name,
        )(*(x[None] if mapped else x for x in leaves))
        return jtu.tree_unflatten(jtu.tree_structure(shapes), [x[0] for x in out])

    @functools.wraps(body, updated=())
    def bound(*args: Any, **kwargs: Any) -> Any:
        with _jaxapi.tracing_mesh(mesh):
            out = bind(args, kwargs)
        if not args or 0 in static:
            return out
        state = args[0]
        if _alike(state, out):
            return jax.lax.with_sharding_constraint(out, where(0, state))
        if type(out) is tuple and out and _alike(state, out[0]):
            return (jax.lax.with_sharding_constraint(out[0], where(0, state)), *out[1:])
        return out

    jitted = jax.jit(bound, static_argnums=static, donate_argnums=donate_argnums)
    donated = _indices(donate_argnums)
    settled: dict[int, Any] = {}  # for each argument, its tree and shardings when last placed

    def placed(args: Sequence[Any]) -> list[Any]:
        out = []
        for i, arg in enumerate(args):
            leaves, tree = jtu.tree_flatten(arg)
            found = [getattr(x, "sharding", None) for x in leaves]
            if i not in static and settled.get(i) != (tree, found):
                leaves, _ = moved(leaves, jtu.tree_leaves(where(i, arg)))
                arg = jtu.tree_unflatten(tree, leaves)
                settled[i] = tree, [x.sharding for x in leaves]
            out.append(arg)
        return out

    @functools.wraps(body, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        ready = placed(args)
        out = jitted(*ready, **kwargs)
        for i in donated:
            give_up(jtu.tree_leaves(args[i]), jtu.tree_leaves(ready[i]))
        return out

    run.mesh = mesh  # type: ignore[attr-defined]
    run.lower = lambda *args, **kwargs: jitted.lower(*placed(args), **kwargs)  # type: ignore
    return run


def _indices(nums: int | Sequence[int]) -> tuple[int, ...]:
    return (nums,) if isinstance(nums, int) else tuple(nums)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _alike(state: Any, out: Any) -> bool:
    a, b = jtu.tree_leaves(state), jtu.tree_leaves(out)
    return (
        bool(a)
        and jtu.tree_structure(state) == jtu.tree_structure(out)
        and all(np.shape(x) == np.shape(y) for x, y in zip(a, b, strict=True))
    )
