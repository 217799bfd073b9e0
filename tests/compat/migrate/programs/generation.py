"""Text generation compiled ahead of time, with pjit over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import maps
from jax.experimental.maps import Mesh
from jax.experimental.pjit import PartitionSpec as P
from jax.experimental.pjit import pjit
from jax.experimental.shard_map import shard_map
from jax.interpreters.xla import DeviceArray

VOCABULARY, LENGTH = 16, 5


def generate(embedding: DeviceArray, prompt: DeviceArray) -> DeviceArray:
    def step(token, _):
        logits = embedding[token] @ embedding.T
        logits = jnp.where(jax.nn.one_hot(token, VOCABULARY) > 0, -jnp.inf, logits)
        token = jnp.argmax(logits, axis=-1)
        return token, token

    _, tokens = jax.lax.scan(step, prompt, None, length=LENGTH)
    return tokens.T


def main():
    data = np.random.default_rng(7)
    embedding = data.normal(size=(VOCABULARY, 8)).astype(np.float32)
    prompts = np.arange(8)
    mesh = maps.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    assert isinstance(mesh, Mesh)
    p_generate = pjit(
        generate,
        in_axis_resources=(P(None, "model"), P("data")),
        out_axis_resources=P("data"),  # rows where their prompts are
    )
    with mesh:
        compiled = p_generate.lower(embedding, prompts).compile()
        tokens = p_generate(embedding, prompts)
    # Scores of the last tokens, each device on its own rows.
    score = shard_map(
        lambda e, t: e[t].sum(-1), mesh, (P(), P("data")), P("data"), check_rep=False
    )
    is_array = jax.tree_map(lambda x: isinstance(x, DeviceArray), {"tokens": tokens})
    return {
        "tokens": tokens,
        "scores": score(embedding, tokens[:, -1]),
        "is_array": int(is_array["tokens"]),
        "compiled": int(compiled is not None),
    }
