"""ResNet-50 on every device, in five steps: on a mesh, and with --pmap as it was before.

    python examples/resnet50.py [--pmap] [--precision bf16] [--remat full] [--steps 20]

(pip install scikit-learn.) The network of He et al. 2016 with its 25.6 million parameters,
strides in the 3x3 convolutions as everybody has them since, batch norm over all devices. It
learns the 8x8 digits scaled to 32x32. Takes about two minutes on two cores, on eight CPU
devices where there is no accelerator; the loss falls from 7 (1000 classes) to below 1.
"""

import argparse
import functools

import equinox as eqx
import jax
import numpy as np
import optax
from resnet import ResNet  # 1. The model.
from sklearn.datasets import load_digits

import compat
import meshdp
from meshdp.report import collectives, table

BATCH = 64  # images per step, over all devices
optimizer = optax.adam(1e-3)


def loss_fn(model, batch, keys, state):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = run(batch["x"], state)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = meshdp.Mean.of(logits.argmax(-1) == batch["y"])
    return (meshdp.Mean.of(losses), {"right": right}), state


# 2. The step, mapped: one device's share, with averages said by hand. On a mesh it is one call.
def make_pmap_step(static):
    @functools.partial(compat.pmap, axis_name="device", donate_argnums=0)
    def step(state, batch):
        params, norms, opt_state = state

        def mean(params):
            (loss, aux), new = loss_fn(eqx.combine(params, static), batch, None, norms)
            return loss.value(), (new, aux["right"].value())

        (loss, (norms, right)), grads = jax.value_and_grad(mean, has_aux=True)(params)
        loss, right, grads = compat.pmean((loss, right, grads), "device")
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, norms, opt_state), {"loss": loss, "right": right}

    return step


def start(key, pmap=False, model=ResNet, **options):
    """The step, its state, and the mesh that its traffic is read by."""
    make = eqx.nn.make_with_state(model)
    if pmap:
        network, norms = make(("batch", "device"), key)
        params, static = eqx.partition(network, eqx.is_array)
        state = compat.replicate((params, norms, optimizer.init(params)))
        return make_pmap_step(static), state, {"device": jax.device_count()}
    step = meshdp.make_train_step(loss_fn, optimizer, stateful=True, **options)
    make = functools.partial(make, ("batch", *meshdp.BATCH_AXES))  # over all devices
    return step, step.init(make, key), step.mesh


def load():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8).repeat(4, 2).repeat(4, 3)
    return {"x": x.repeat(3, 1), "y": y.astype(np.int32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pmap", action="store_true", help="the twin, in float32")
    parser.add_argument("--precision", default="full", choices=["full", "bf16", "f16"])
    parser.add_argument("--remat", default="none", choices=["none", "full", "dots"])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps takes a number from 1, not {args.steps}")
    if args.pmap and (args.precision, args.remat) != ("full", "none"):
        parser.error("--pmap is in float32 and keeps everything")
    key, data, rng = jax.random.key(0), load(), np.random.default_rng(0)
    options = {} if args.pmap else {"precision": args.precision, "remat": args.remat}
    step, state, mesh = start(key, args.pmap, **options)
    model = compat.first(state[0]) if args.pmap else state.model
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print(f"{count:,} parameters, {jax.device_count()} devices")
    for i in range(args.steps):
        rows = rng.choice(len(data["y"]), BATCH, replace=False)
        batch = {k: v[rows] for k, v in data.items()}
        batch = compat.shard(batch) if args.pmap else batch  # 3. The data are placed.
        if i == 0:
            print(table(collectives(step.lower(state, batch).compile(), mesh)))
        state, out = step(state, batch)  # 4. Called. 5. The averages are in `out`.
        loss, right = np.mean(out["loss"]), np.mean(out["right"])
        print(f"step {i:2d}  loss {loss:.3f}  right {right:.0%}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are used where there are any
    main()
