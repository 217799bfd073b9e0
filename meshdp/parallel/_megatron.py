"""Where the weights of a transformer lie, without a regex; and its usual parts, applied."""

import re
from collections.abc import Collection
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax import Array
from jax.sharding import PartitionSpec as P

from .._check import path_str
from .._layout import Layout, by_path
from ._attention import attention
from ._tensor import columns, row

COLUMNS = frozenset(
    "qkv q k v query key value wq wk wv q_proj k_proj v_proj query_proj key_proj value_proj "
    "up gate up_proj gate_proj fc1 w1 w3 head lm_head unembed".split()
)
"""Names of parts that `megatron` splits by their outputs."""

ROWS = frozenset("out o wo o_proj out_proj output_proj down down_proj fc2 w2".split())
"""Names of parts that `megatron` splits by their inputs."""

TABLES = frozenset("embed embedding embeddings token_embed wte tok_embeddings".split())
"""Names of parts that `megatron` splits by the vocabulary."""


def megatron(
    model: Any,
    *,
    columns: Collection[str] = COLUMNS,
    rows: Collection[str] = ROWS,
    tables: Collection[str] = TABLES,
) -> Layout:
    """A layout that splits a transformer over `"tensor"`: by columns, then by rows.

    ```python
    shapes = eqx.filter_eval_shape(make_model, key)
    layout = meshdp.parallel.megatron(shapes) | meshdp.fsdp()
    ```

    `equinox.nn.MultiheadAttention`, `equinox.nn.MLP` and `equinox.nn.Embedding` are known by
    their type, with the biases that belong to them. Any other matrix is known by its name or
    that of the part which holds it: `.blocks[0].up.weight` and `['up']` are split by columns.
    Dimensions are counted from the end, `[..., out, in]`, so layers stacked along a first
    dimension are split alike. What is not known stays free for `fsdp`.

    Where a part is applied by hand, use `columns`, `row`, `embed` and `cross_entropy`, or
    `mlp` and `self_attention`, which put the collectives where Megatron has them.

    **Arguments:**

    - `model`: the model, or its shapes (`equinox.filter_eval_shape`).
    - `columns`, `rows`, `tables`: the names, of a field, key or index, to go by.

    **Raises:**

    - `ValueError`: if nothing in the model is known, or a name is in two of the sets.
    """
    for name, value in (("columns", columns), ("rows", rows), ("tables", tables)):
        if isinstance(value, str):
            raise ValueError(
                f"megatron takes {name} as a set of names, not {value!r}: give {{{value!r}}}."
            )
    twice = sorted(
        (set(columns) & set(rows)) | (set(rows) & set(tables)) | (set(columns) & set(tables))
    )
    if twice:
        raise ValueError(
            f"megatron: {', '.join(map(repr, twice))} in more than one of columns, rows and "
            "tables. A matrix is split one way: keep each name in one."
        )
    known: dict[int, str] = {}
    is_part = lambda x: isinstance(x, (eqx.nn.MultiheadAttention, eqx.nn.MLP, eqx.nn.Embedding))
    for part in filter(is_part, jax.tree.leaves(model, is_leaf=is_part)):
        known |= _of_part(part)
    leaves = [x for x in jtu.tree_leaves_with_path(model) if hasattr(x[1], "shape")]
    found: dict[str, dict[str, P]] = {}
    for path, x in leaves:
        kind = known.get(id(x)) or _by_name(path, columns, rows, tables)
        spec = _spec(kind, path, x.ndim)
        text = path_str(path)
        # No "^": in a training state the model's paths have something in front.
        pattern = re.sub(r"\\\[\d+\\\]", r"\\[\\d+\\]", re.escape(text)) + "$"
        found.setdefault(pattern, {})[text] = spec
    rules = {}
    for pattern, specs in found.items():
        if len(set(specs.values())) == 1:
            rules[pattern] = next(iter(specs.values()))
        else:  # layers that differ
            rules |= {f"{re.escape(text)}$": spec for text, spec in specs.items()}
    rules = {regex: spec for regex, spec in rules.items() if any(spec)}
    if not rules:
        paths = ", ".join(path_str(p) for p, _ in leaves[:3]) or "none"
        raise ValueError(
            "megatron knows no part of this model: it has no equinox.nn.MultiheadAttention, "
            f"MLP or Embedding, and no matrix of a name that it looks for. Its arrays: {paths}."
            ' Give your own names: megatron(model, columns={"up"}, rows={"down"}), or write '
            "the layout with meshdp.by_path."
        )
    return by_path(rules)


def _of_part(part: Any) -> dict[int, str]:
    """What each array of an Equinox part is, by identity."""
    if isinstance(part, eqx.nn.Embedding):
        return {id(part.weight): "columns"}
    if isinstance(part, eqx.nn.MLP):
        layers = part.layers
        last = len(layers) - 1
        kinds = ["rows" if i % 2 else "columns" for i in range(len(layers))]
        if last % 2 == 0:
            kinds[last] = "whole"  # split by its outputs, nothing would sum it
    else:
        layers = [part.query_proj, part.key_proj, part.value_proj, part.output_proj]
        kinds = ["columns"] * 3 + ["rows"]
    out = {}
    for layer, kind in zip(layers, kinds, strict=True):
        out[id(layer.weight)] = kind
        if layer.bias is not None:
            out[id(layer.bias)] = "bias" if kind == "columns" else "whole"
    return out


def _by_name(path, columns, rows, tables) -> str:
    names = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", "")))) for k in path]
    last = names[-1] if names else ""
    bias = last == "bias"
    holder = names[-2] if last in ("weight", "bias", "kernel") and len(names) > 1 else last
    if holder in columns:
        return "bias" if bias else "columns"
    if holder in tables and not bias:
        return "columns"
    return "rows" if holder in rows and not bias else "whole"


def _spec(kind: str, path, ndim: int) -> P:
    stacked = (None,) * (ndim - 2)
    if kind == "columns" and ndim >= 2:
        return P(*stacked, "tensor")
    if kind == "rows" and ndim >= 2:
        return P(*stacked, None, "tensor")
    if kind == "bias" and ndim >= 1:
        return P(*(None,) * (ndim - 1), "tensor")
    return P()


def mlp(module: eqx.nn.MLP, x: Array, *, sequence: bool = False) -> Array:
    """Applies an `equinox.nn.MLP` to `[batch, tokens, in]`, split as `megatron` splits it.

    One all-reduce forward and one backward for two layers. The activation must be a function.
    `sequence` is as for `row`.
    """
    for what in (module.activation, module.final_activation):
        if any(eqx.is_array(leaf) for leaf in jax.tree.leaves(what)):
            raise ValueError(
                "mlp takes an equinox.nn.MLP whose activations are functions, not modules "
                f"with arrays: {what!r}. Write it with columns and row."
            )
    last = len(module.layers) - 1
    if module.in_size == "scalar":
        x = x[..., None]
    for i, layer in enumerate(module.layers):
        if i == last and i % 2 == 0:  # an odd one at the end, whole
            x = _plain(x, layer)
        else:
            x = (
                row(x, layer, sequence=sequence)
                if i % 2
                else columns(x, layer, sequence=sequence)[0]
            )
        x = module.final_activation(x) if i == last else module.activation(x)
    return x[..., 0] if module.out_size == "scalar" else x


def _plain(x: Array, layer: Any) -> Array:
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias.reshape(1, 1, -1)


def self_attention(
    module: eqx.nn.MultiheadAttention, x: Array, *, sequence: bool = False, **how: Any
) -> Array:
    """Applies an `equinox.nn.MultiheadAttention` to `[batch, tokens, width]`.

    As `jax.vmap(lambda x: module(x, x, x))`, without dropout. Heads are split over
    `"tensor"` and tokens over `"seq"`: one all-reduce over `"tensor"` forward and one
    backward. `how` goes to `attention`: `causal`, `mask`, `segment_ids`, `method`, `order`.
    `sequence` is as for `row`.
    """
    dropout = module.dropout
    if dropout.p > 0 and not dropout.inference:
        raise ValueError(
            f"self_attention drops no attention weights, but the module has dropout_p="
            f"{dropout.p}. Make it with dropout_p=0 (and drop from what it returns, if need "
            "be), or call eqx.nn.inference_mode on it."
        )
    layers = module.query_proj, module.key_proj, module.value_proj
    heads = lambda y: y.reshape(*y.shape[:2], module.num_heads, -1)
    q, k, v = map(heads, columns(x, *layers, sequence=sequence))
    out = attention(q, k, v, **how)
    return row(out.reshape(*out.shape[:2], -1), module.output_proj, sequence=sequence)
