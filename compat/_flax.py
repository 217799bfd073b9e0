"""What `flax.jax_utils` and `flax.training.common_utils` offered around pmap.

Needs no Flax. The trees may come from anywhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from compat._place import unreplicate


def shard(xs: Any) -> Any:
    """Splits the leading dimension over this process's devices: `[B, ...]` becomes
    `[devices, B / devices, ...]`.

    **Raises:**

    - `ValueError`: if a leaf does not divide; every such leaf is named.
    """
    n = jax.local_device_count()
    faults = [
        f"  batch{jtu.keystr(path)}: {np.shape(x)}"
        for path, x in jtu.tree_leaves_with_path(xs)
        if not np.ndim(x) or np.shape(x)[0] % n
    ]
    if faults:
        raise ValueError(
            f"{len(faults)} leaves of the batch do not divide over {n} devices:\n"
            + "\n".join(faults)
            + f"\nMake the leading dimension a multiple of {n}, or wrap the mapped function "
            "in compat.pad_shard_unpad."
        )
    return jtu.tree_map(lambda x: x.reshape((n, -1, *x.shape[1:])) if x.size else x, xs)


def shard_prng_key(key: jax.Array) -> jax.Array:
    """Splits a key into one for each device of this process."""
    return jax.random.split(key, jax.local_device_count())


def stack_forest(forest: Sequence[Any]) -> Any:
    """Stacks the leaves of trees of one structure: a list of metrics becomes a tree of
    series.

    **Raises:**

    - `ValueError`: if there are no trees, or they differ in structure or shapes.
    """
    if isinstance(forest, dict) or not len(forest):
        what = "a dict" if isinstance(forest, dict) else "no trees"
        raise ValueError(
            f"stack_forest was given {what}. Give a list of trees of one structure, such as "
            "the metrics of each step."
        )
    return jtu.tree_map(lambda *leaves: jnp.stack(leaves), *forest)


def get_metrics(device_metrics: Sequence[Any]) -> Any:
    """Brings a list of mapped metrics to the host: the first replica's, stacked over steps."""
    return stack_forest(jax.device_get(unreplicate(device_metrics)))


def onehot(
    labels: jax.Array, num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> jax.Array:
    """Codes integer labels `[...]` as float32 `[..., num_classes]`.

    Labels out of range get `off_value` everywhere.
    """
    hit = jnp.expand_dims(labels, -1) == jnp.arange(num_classes, dtype=labels.dtype).reshape(
        (1,) * labels.ndim + (num_classes,)
    )
    return jnp.where(hit, jnp.float32(on_value), jnp.float32(off_value))


def scan_in_dim(
    body_fn: Callable,
    init: Any,
    xs: Any,
    axis: int | Sequence[int] = (0,),
    unroll: int | Sequence[int] = (1,),
    keepdims: bool = False,
) -> tuple[Any, Any]:
    """Does a `lax.scan` over any dimensions, the last one fastest.

    **Arguments:**

    - `body_fn`: `(carry, x) -> (carry, y)`.
    - `init`: the first carry.
    - `xs`: arrays to scan over.
    - `axis`: the dimensions scanned over. Results get the same dimensions in the same places.
    - `unroll`: iterations unrolled, for each dimension; a shorter list counts from the
        innermost.
    - `keepdims`: leave dimensions of size 1 where those scanned over were.

    **Returns:**

    `(carry, ys)`.
    """
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    if not axes:
        raise ValueError("scan_in_dim was given no axis. Give at least one dimension, axis=0.")
    each = tuple(unroll) if isinstance(unroll, Sequence) else (unroll,)
    each = (1,) * (len(axes) - len(each)) + each
    front = tuple(range(len(axes)))
    forward = lambda x: jnp.moveaxis(x, axes, front)
    back = lambda y: jnp.moveaxis(y, front, axes)

    def body(carry, x):
        if not keepdims:
            return body_fn(carry, x)
        x = jtu.tree_map(lambda a: back(jnp.expand_dims(a, front)), x)
        carry, y = body_fn(carry, x)
        return carry, jtu.tree_map(lambda a: jnp.squeeze(forward(a), front), y)

    def loop(depth: int) -> Callable:
        inner = body if depth == len(axes) - 1 else loop(depth + 1)
        return lambda carry, x: lax.scan(inner, carry, x, unroll=each[depth])

    carry, ys = loop(0)(init, jtu.tree_map(forward, xs))
    return carry, jtu.tree_map(back, ys)


def pad_shard_unpad(
    wrapped: Callable,
    static_argnums: int | Sequence[int] = (0,),
    static_argnames: str | Sequence[str] = (),
    static_return: bool = False,
) -> Callable:
    """Makes a mapped function take batches of any size.

    Batches are padded with zeros on the host, split over this process's devices, and results
    are joined and cut to the batch's size again (NumPy arrays on the host).

    **Arguments:**

    - `wrapped`: a mapped function, usually `(params, batch, ...)`.
    - `static_argnums`, `static_argnames`: arguments passed on as they are; by default the
        first, the parameters.
    - `static_return`: pass the result on as it is, for instance metrics.

    **Returns:**

    A function of the same arguments and `min_device_batch=None`, the least rows that each
    device gets, so that a small last batch does not compile again.
    """

    if isinstance(static_argnums, int):
        static_argnums = (static_argnums,)
    if isinstance(static_argnames, str):
        static_argnames = (static_argnames,)

    @functools.wraps(wrapped, updated=())
    def padded(*args: Any, min_device_batch: int | None = None, **kwargs: Any) -> Any:
        batches = [a for i, a in enumerate(args) if i not in static_argnums]
        batches += [a for k, a in kwargs.items() if k not in static_argnames]
        # Scalars count as -1.
        sizes = {(*np.shape(x), -1)[0] for x in jtu.tree_leaves(batches)}
        if len(sizes) != 1 or -1 in sizes:
            told = ["no" if n < 0 else n for n in sorted(sizes)]
            raise ValueError(
                f"pad_shard_unpad was given batches of {told} rows. Give batches of one size, "
                "and name the other arguments in static_argnums or static_argnames."
            )
        rows, devices = sizes.pop(), jax.local_device_count()
        each = max(-(-rows // devices), min_device_batch or 0)

        def pad(x: Any) -> Any:
            extra = [(0, each * devices - rows)] + [(0, 0)] * (np.ndim(x) - 1)
            return np.pad(np.asarray(x), extra).reshape((devices, each, *np.shape(x)[1:]))

        args = tuple(
            a if i in static_argnums else jtu.tree_map(pad, a) for i, a in enumerate(args)
        )
        kwargs = {
            k: a if k in static_argnames else jtu.tree_map(pad, a) for k, a in kwargs.items()
        }
        out = wrapped(*args, **kwargs)
        if static_return:
            return out
        unpad = lambda y: np.asarray(y).reshape((devices * each, *y.shape[2:]))[:rows]
        return jtu.tree_map(unpad, out)

    return padded


def tree_map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable | None = None) -> Any:
    """As `jax.tree.map`, under the name it had."""
    return jtu.tree_map(f, tree, *rest, is_leaf=is_leaf)


def tree_multimap(f: Callable, tree: Any, *rest: Any, is_leaf: Callable | None = None) -> Any:
    """As `jax.tree.map` of several trees, under the name it had."""
    return jtu.tree_map(f, tree, *rest, is_leaf=is_leaf)
