"""What rematerialisation saves: temporary memory of a step of the demo's GPT with 12 layers.

    python tests/benchmarks/train_memory.py      (three minutes, all of it compiling)

Read from the compiled program, per device; nothing runs. `separate` is the model as it is, a
Python loop over its blocks; `scanned` has them stacked, under one `jax.lax.scan`. The batch is
32 x 128 bytes on 8 forced CPU devices, data parallel; the optimizer is AdamW.
"""

from _timing import header, prepare

prepare()

import equinox as eqx  # noqa: E402
import gpt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import meshdp  # noqa: E402

LAYERS = 12
BATCH = jax.ShapeDtypeStruct((32, 128 + 1), jnp.int32)  # global


class Scanned(eqx.Module):
    """The demo's GPT with its blocks stacked."""

    model: gpt.GPT  # without blocks
    blocks: gpt.Block  # each array [LAYERS, ...]

    def __init__(self, key, **options):
        model = gpt.GPT(key, **options)
        self.blocks = jax.tree.map(lambda *x: jnp.stack(x), *model.blocks)
        self.model = eqx.tree_at(lambda m: m.blocks, model, [])

    def __call__(self, tokens, keys):
        batch, length = tokens.shape
        x = self.model.embed[tokens] + self.model.position[:length]

        def layer(x, given):
            block, i = given
            return block(x, batch, jax.vmap(jax.random.fold_in, (0, None))(keys, i)), None

        given = self.blocks, jnp.arange(LAYERS)
        x, _ = jax.lax.scan(layer, x.reshape(batch * length, -1), given)
        x = gpt.norm(x, self.model.norm) @ self.model.head.T
        return x.reshape(batch, length, gpt.VOCAB)


def temporaries(model, remat) -> int:
    """Bytes on one device."""
    step = meshdp.make_train_step(
        gpt.loss_fn, optax.adamw(1e-3), mesh=meshdp.make_mesh(), layout=gpt.LAYOUT, remat=remat
    )
    state = step.init(lambda key: model(key, depth=LAYERS), jax.random.key(0))
    return step.lower(state, BATCH).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    print(header())
    for name, model in {"separate": gpt.GPT, "scanned": Scanned}.items():
        whole = temporaries(model, "none")
        print(f"{name:8}  none  {whole / 1e6:6.1f} MB")
        for remat in ("dots", "full"):
            less = temporaries(model, remat)
            print(f"{name:8}  {remat}  {less / 1e6:6.1f} MB  {whole / less:.1f} times less")


if __name__ == "__main__":
    main()
