"""Three models in plain JAX, that both our step and the oracle train."""

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS, DIM, HIDDEN, HEADS, LAYERS, VOCAB = 32, 8, 16, 32, 8, 2, 24


def linear_init(key):
    return {"w": 0.1 * jax.random.normal(key, (DIM, HIDDEN)), "b": jnp.zeros(HIDDEN)}


def linear(params, x, key):
    return x @ params["w"] + params["b"]


def mlp_init(key):
    k1, k2 = jax.random.split(key)
    return {
        "up": {"weight": 0.3 * jax.random.normal(k1, (HIDDEN, DIM)), "bias": jnp.zeros(HIDDEN)},
        "down": {"weight": 0.2 * jax.random.normal(k2, (HIDDEN, HIDDEN))},
    }


def mlp(params, x, key):
    h = jnp.tanh(params["up"]["weight"] @ x + params["up"]["bias"])
    h = h * jax.random.bernoulli(key, 0.8, h.shape) / 0.8
    return params["down"]["weight"] @ h


def transformer_init(key):
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-1])
    return {
        "embed": normal(VOCAB, DIM),
        "blocks": {
            "scale": jnp.ones((LAYERS, DIM)),
            "qkv": normal(LAYERS, 3, HEADS, DIM // HEADS, DIM),
            "out": normal(LAYERS, DIM, HEADS, DIM // HEADS),
            "up": normal(LAYERS, HIDDEN, DIM),
            "down": normal(LAYERS, DIM, HIDDEN),
        },
        "head": normal(VOCAB, DIM),
    }


def _norm(x, scale):
    return scale * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def transformer(params, tokens, key):
    x = params["embed"][tokens]

    def block(x, layer):
        p, key = layer
        h = _norm(x, p["scale"][None])
        q, k, v = jnp.einsum("shed,td->shte", p["qkv"], h)
        scores = jnp.einsum("hte,hue->htu", q, k) / (DIM // HEADS) ** 0.5
        causal = jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        x = x + jnp.einsum("dhe,hte->td", p["out"], jnp.einsum("htu,hue->hte", weights, v))
        h = jax.nn.gelu(_norm(x, p["scale"][None]) @ p["up"].T)
        h = h * jax.random.bernoulli(key, 0.9, h.shape) / 0.9
        return x + h @ p["down"].T, None

    x, _ = jax.lax.scan(block, x, (params["blocks"], jax.random.split(key, LAYERS)))
    return x @ params["head"].T


def _squares(out, batch):
    return jnp.square(out - batch["y"]).sum(-1)


def _entropies(out, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(out), batch["y"][..., None], -1)[..., 0]


def _vectors(rng):
    # Most of the examples of the first devices are masked out, all of the first device's.
    mask = (rng.random(ROWS) < 0.6) & (np.arange(ROWS) >= 5)
    return {
        "x": rng.standard_normal((ROWS, DIM)).astype(np.float32),
        "y": rng.standard_normal((ROWS, HIDDEN)).astype(np.float32),
        "mask": mask,
    }


def _tokens(rng):
    mask = rng.random((ROWS, TOKENS)) < 0.7
    mask[:5] = False
    return {
        "x": rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32),
        "y": rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32),
        "mask": mask,
    }


# name: (init, apply to one example, losses of a batch, batch)
MODELS = {
    "linear": (linear_init, linear, _squares, _vectors),
    "mlp": (mlp_init, mlp, _squares, _vectors),
    "transformer": (transformer_init, transformer, _entropies, _tokens),
}
