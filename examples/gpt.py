"""A byte-level GPT in Equinox, written for one device: `python -m meshdp demo` trains it.

Marked `# <-` is what the mesh needs to know: the layout of the weights, and where the
activations lie at the two Megatron points (Shoeybi et al. 2019); without a mesh, nothing.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

import meshdp

VOCAB = 256  # a token is a byte
EXAMPLES = ("data", "fsdp")  # the mesh axes that share them

# Weights are [out, in]. Split by columns, then by rows, each half block sums over `tensor`
# once. Large weights are split over `fsdp` along the other dimension.
SPLIT = {r"\.(qkv|up)$": P("tensor"), r"\.(out|down)$": P(None, "tensor")}
LAYOUT = meshdp.by_path(SPLIT) | meshdp.fsdp(min_size=2**14)  # <-


def weight(key: Array, n_out: int, n_in: int, gain: float = 1.0) -> Array:
    return gain / n_in**0.5 * jr.normal(key, (n_out, n_in))


def norm(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None]


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal, `[batch, tokens, heads, size] -> [batch * tokens, heads * size]`."""
    # `jax.nn.dot_product_attention` makes the whole step 12 % slower on CPU.
    batch, tokens, _, size = q.shape
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / size**0.5
    past = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
    shares = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", shares, v).transpose(0, 2, 1, 3)
    return mixed.reshape(batch * tokens, -1)


def dropout(x: Array, rate: float, keys: Array | None) -> Array:
    """Each example draws its mask from its own key: the same one on any mesh."""
    if keys is None or rate == 0:
        return x
    shape = (x.shape[0] // len(keys), x.shape[1])
    kept = jax.vmap(lambda key: jr.bernoulli(key, 1 - rate, shape))(keys)
    return jnp.where(kept.reshape(x.shape), x / (1 - rate), 0)


class Block(eqx.Module):
    norms: Array  # [2, width]
    qkv: Array  # [3 * width, width], rows by (head, {q, k, v}, size): no head is ever cut
    out: Array  # [width, width]
    up: Array  # [4 * width, width]
    down: Array  # [width, 4 * width]
    heads: int = eqx.field(static=True)
    rate: float = eqx.field(static=True)

    def __init__(self, key: Array, width: int, heads: int, rate: float):
        keys = jr.split(key, 4)
        self.norms, self.heads, self.rate = jnp.ones((2, width)), heads, rate
        self.qkv = weight(keys[0], 3 * width, width)
        self.out = weight(keys[1], width, width, gain=0.1)
        self.up = weight(keys[2], 4 * width, width)
        self.down = weight(keys[3], width, 4 * width, gain=0.1)

    def __call__(self, x: Array, batch: int, keys: Array | None) -> Array:
        """`x` is `[batch * tokens, width]`; `keys` `[batch]`, or `None` to drop nothing."""
        k1, k2 = (None, None) if keys is None else jax.vmap(jr.split, out_axes=1)(keys)
        h = norm(x, self.norms[0]) @ self.qkv.T
        h = h.reshape(batch, x.shape[0] // batch, self.heads, -1)
        h = meshdp.constrain(h, P(EXAMPLES, None, "tensor"))  # <-
        h = attention(*jnp.split(h, 3, axis=-1)) @ self.out.T
        x = x + dropout(meshdp.constrain(h, P(EXAMPLES)), self.rate, k1)  # <-
        h = norm(x, self.norms[1]) @ self.up.T
        h = jax.nn.gelu(meshdp.constrain(h, P(EXAMPLES, "tensor")))  # <-
        h = h @ self.down.T
        return x + dropout(meshdp.constrain(h, P(EXAMPLES)), self.rate, k2)  # <-


class GPT(eqx.Module):
    embed: Array  # [VOCAB, width]
    position: Array  # [context, width]
    blocks: list[Block]  # not stacked and scanned: that takes 1.7 times as long on CPU
    norm: Array  # [width]
    head: Array  # [VOCAB, width]

    def __init__(self, key: Array, width=128, depth=4, heads=4, context=128, rate=0.1):
        keys = jr.split(key, depth + 3)
        self.embed = 0.1 * jr.normal(keys[0], (VOCAB, width))
        self.position = 0.02 * jr.normal(keys[1], (context, width))
        self.blocks = [Block(k, width, heads, rate) for k in keys[3:]]
        self.norm, self.head = jnp.ones(width), weight(keys[2], VOCAB, width, gain=0.5)

    def __call__(self, tokens: Array, keys: Array | None = None) -> Array:
        """Logits of the next byte, `[batch, tokens, VOCAB]`; `tokens` is `[batch, tokens]`."""
        batch, length = tokens.shape
        x = (self.embed[tokens] + self.position[:length]).reshape(batch * length, -1)
        for i, block in enumerate(self.blocks):
            mine = None if keys is None else jax.vmap(jr.fold_in, (0, None))(keys, i)
            x = block(x, batch, mine)
        return (norm(x, self.norm) @ self.head.T).reshape(batch, length, VOCAB)


def loss_fn(model: GPT, tokens: Array, keys: Array | None) -> meshdp.Mean:
    """How surprising each byte is, in nats; `tokens` is `[batch, context + 1]`."""
    logits = model(tokens[:, :-1], keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return meshdp.Mean.of(losses)
