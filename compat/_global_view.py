"""A pmap-style step in mesh style, its body unchanged."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compat._bodies import Frame, frames
from compat._collectives import explain
from meshdp import _jaxapi
from meshdp._layout import Layout, replicate, specs
from meshdp._mesh import make_mesh
from meshdp._place import place

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

    @functools.wraps(body, updated=())
    def bound(*args: Any, **kwargs: Any) -> Any:
        def one() -> Any:
            frames().append(Frame(axis_name, True, 1, (), 0))
            try:
                return body(*args, **kwargs)
            except NameError as e:
                better = explain(e, [(f.name, f.given) for f in frames()])
                raise better.with_traceback(e.__traceback__) from None
            finally:
                frames().pop()

        with _jaxapi.tracing_mesh(mesh):
            # Nothing is mapped over, so nothing gets a dimension of 1 but what comes from the
            # axis itself.
            out = jax.vmap(one, in_axes=(), axis_size=1, axis_name=axis_name)()
            out = jtu.tree_map(lambda x: x[0], out)
        if not args or 0 in static:
            return out
        state, kept = args[0], None
        if _alike(state, out):
            kept = jax.lax.with_sharding_constraint(out, where(0, state))
        elif isinstance(out, tuple) and out and _alike(state, out[0]):
            first = jax.lax.with_sharding_constraint(out[0], where(0, state))
            kept = type(out)(*(first, *out[1:])) if hasattr(out, "_fields") else None
            kept = (first, *out[1:]) if kept is None else kept
        return out if kept is None else kept

    jitted = jax.jit(bound, static_argnums=static, donate_argnums=donate_argnums)
    donated = _indices(donate_argnums)

    def placed(args: Sequence[Any]) -> list[Any]:
        return [
            a if i in static else place(a, where(i, a), share=i not in donated)
            for i, a in enumerate(args)
        ]

    @functools.wraps(body, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        return jitted(*placed(args), **kwargs)

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
