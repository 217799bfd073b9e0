"""Our step against the same step in raw JAX, data parallel on 8 forced CPU devices.

    python tests/benchmarks/step_speed.py [mlp] [mlp-out-in] [gpt]      (a minute each)

The models are an MLP 512-1024-512 on 256 rows, with weights `[in, out]` and `[out, in]`, and
the demo's GPT on 32 x 128 bytes, with dropout. The optimizer is Adam. All forms run the same
loss. The eight devices share the machine's cores, so this measures work and overhead, not
what eight devices would take.
"""

import sys
from unittest import mock

from _timing import Chain, compare, header, in_turns, prepare

prepare()

import _by_hand  # noqa: E402
import equinox as eqx  # noqa: E402
import gpt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import meshdp  # noqa: E402

mlp_rows = 256  # global
gpt_rows, gpt_bytes = 32, 128  # global
rounds = {"mlp": 40, "mlp-out-in": 40, "gpt": 20}
chain = {"mlp": 10, "mlp-out-in": 10, "gpt": 2}  # steps
optimizer = optax.adam(1e-3)


def mlp(out_in: bool):
    """`loss_fn` for our step, a maker of the model, and a batch."""
    shapes = {"w1": (512, 1024), "w2": (1024, 512)}

    def make(key):
        keys = dict(zip(shapes, jax.random.split(key), strict=True))
        weights = {k: jax.random.normal(keys[k], s) / s[0] ** 0.5 for k, s in shapes.items()}
        weights = {k: w.T if out_in else w for k, w in weights.items()}
        return {**weights, "b1": jnp.zeros((1, 1024)), "b2": jnp.zeros((1, 512))}

    def loss_fn(params, x, keys):
        w1, w2 = (w.T if out_in else w for w in (params["w1"], params["w2"]))
        y = jnp.tanh(x @ w1 + params["b1"]) @ w2 + params["b2"]
        return meshdp.Mean.of((y - x) ** 2)

    rows = np.random.default_rng(0).standard_normal((mlp_rows, 512)).astype(np.float32)
    return loss_fn, make, rows


def byte_gpt():
    """As `mlp`, for the demo's model."""
    tokens = np.random.default_rng(0).integers(0, 256, (gpt_rows, gpt_bytes + 1))
    return gpt.loss_fn, gpt.GPT, tokens.astype(np.int32)


models = {"mlp": lambda: mlp(False), "mlp-out-in": lambda: mlp(True), "gpt": byte_gpt}


def cases(name: str) -> dict[str, Chain]:
    """Our step and the three by hand, with their states."""
    loss_fn, make, batch = models[name]()
    step = meshdp.make_train_step(
        loss_fn, optimizer, mesh=meshdp.make_mesh(), layout=meshdp.replicate()
    )
    state = step.init(make, jax.random.key(0))
    ours = step, state, meshdp.shard_batch(batch, step.mesh)

    params, static = eqx.partition(jax.jit(make)(jax.random.key(0)), eqx.is_array)

    def mean(params, batch, keys):
        # Our hint to the compiler has no place in a step by hand, nor these axes on its mesh.
        with mock.patch.object(meshdp, "constrain", lambda x, spec: x):
            found = loss_fn(eqx.combine(params, static), batch, keys)
        return found.total / found.weight

    by_hand = {k: f(mean, optimizer, params, batch) for k, f in _by_hand.FORMS.items()}
    return {k: Chain(*f, chain[name]) for k, f in {"meshdp": ours, **by_hand}.items()}


def main() -> None:
    print(header())
    for name in sys.argv[1:] or models:
        runs = cases(name)
        times = in_turns(runs, rounds[name])
        print(f"{name}:\n{compare(times, 'meshdp')}")
        ends = {k: run.last["loss"] if k == "meshdp" else run.last for k, run in runs.items()}
        ends = {k: float(np.ravel(x)[0]) for k, x in ends.items()}
        print("  loss at the end: " + ", ".join(f"{k} {x:.3g}" for k, x in ends.items()))


if __name__ == "__main__":
    main()
