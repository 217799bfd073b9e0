"""One GPT with experts on any mesh: the same losses, whatever the axes.

    python examples/hybrid_gpt.py --mesh data=2,stage=2,tensor=2    (about a minute on a laptop)

Learns its own source on forced CPU devices: the loss falls from 6.0 to 4.7. Or try data=1, or
data=2,fsdp=2,seq=2, or data=2,expert=4. Marked `# <-`: what any of them needs.
"""

import argparse
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import parallel, testing

VOCAB, WIDTH, HEADS, LAYERS, EXPERTS = 256, 32, 4, 4, 4  # a token is a byte
BATCH, TOKENS, STEPS = 16, 32, 8  # examples per step over all devices; bytes per example
AXES = "data fsdp stage expert seq tensor".split()
MESH = {"data": 2, "stage": 2, "tensor": 2}


def make_model(key):
    keys = iter(jax.random.split(key, 9))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / WIDTH**0.5
    layers = {name: normal(LAYERS, WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    layers["router"] = normal(LAYERS, WIDTH, EXPERTS)
    layers["grow"] = normal(LAYERS, EXPERTS, WIDTH, 4 * WIDTH)
    layers["shrink"] = normal(LAYERS, EXPERTS, 4 * WIDTH, WIDTH)
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "head": normal(VOCAB, WIDTH)}


norm = lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
expert = lambda w, x, rows: rows.dot(jax.nn.gelu(rows.dot(x, w["grow"])), w["shrink"])


def layer(w, x, context):  # x: [examples, tokens, width]
    qkv = parallel.columns(norm(x), w["q"], w["k"], w["v"])  # <-
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in qkv)
    y = parallel.attention(q, k, v, causal=True, order="zigzag")  # <-
    x = x + parallel.row(y.reshape(x.shape), w["out"])  # <-
    routing = parallel.route(norm(x) @ w["router"], top_k=2)
    weights = {name: w[name] for name in ("grow", "shrink")}
    return x + parallel.experts(expert, weights, norm(x), routing, capacity=None)[0]  # <-


def loss_fn(model, batch, keys):
    data = parallel.zigzag(batch)  # <-
    x = parallel.embed(model["embed"], data["x"])  # <-
    x = parallel.pipeline(layer, model["layers"], x, microbatches=4)  # <-
    (logits,) = parallel.columns(norm(x), model["head"])  # <-
    return meshdp.Mean.of(parallel.cross_entropy(logits, data["y"]))  # <-


def make_step(mesh):
    layout = meshdp.by_path({"layers": P("stage")})  # <-
    layout |= meshdp.by_path({"grow|shrink": P(None, "expert")})  # <-
    layout |= parallel.megatron(jax.eval_shape(make_model, jax.random.key(0)))  # <-
    layout |= meshdp.fsdp(min_size=2**12)  # <-
    return meshdp.make_train_step(loss_fn, optax.adam(3e-3), mesh=mesh, layout=layout)


def sizes(text):
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    good = all(axis in AXES and n.isdecimal() and int(n) for axis, n in pairs)
    if not good or len(dict(pairs)) < len(pairs) or math.prod(int(n) for _, n in pairs) > 64:
        what = "each at most once, with a number of devices, of which there are 64 at most"
        raise argparse.ArgumentTypeError(f"{text!r}; it takes {', '.join(AXES)}, {what}")
    return {axis: int(n) for axis, n in pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    text = "devices along each axis (data=2,stage=2,tensor=2)"
    parser.add_argument("--mesh", type=sizes, default=MESH, metavar="AXIS=N,...", help=text)
    mesh = parser.parse_args().mesh
    testing.force_devices(math.prod(mesh.values()))
    try:
        step = make_step(meshdp.make_mesh(**mesh))
        state = step.init(make_model, jax.random.key(0))
        text = np.fromfile(__file__, np.uint8).astype(np.int32)
        for i in range(STEPS):
            first = np.random.default_rng(i).integers(0, len(text) - TOKENS - 1, (BATCH, 1))
            at = first + np.arange(TOKENS)
            state, metrics = step(state, {"x": text[at], "y": text[at + 1]})
            print(f"loss {float(metrics['loss']):.4f}", flush=True)
    except ValueError as e:  # sizes that do not divide the model or the batch
        parser.error(f"argument --mesh: {e}")
    except KeyboardInterrupt:
        sys.exit("Stopped by Ctrl-C.")


if __name__ == "__main__":
    main()
