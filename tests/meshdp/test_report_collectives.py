"""Collectives of real programs against truth worked out by hand, on 8 and on 64 devices.

Run as a script with a number of devices, this file prints what it finds as JSON: 64 devices
need a process of their own.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp.report._hlo import by_axis, collectives

LAYERS, WIDTH, ROWS = 3, 64, 2  # rows per device


def make_mesh(devices=None, **sizes) -> Mesh:
    devices = np.array(jax.devices()) if devices is None else devices
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def compiled_in(f, mesh, in_specs, out_specs, *shapes):
    f = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return collectives(jax.jit(f).lower(*args).compile(), mesh)


def found_in(*args):
    return sorted(
        [c.kind, list(c.axes), list(c.shape), c.sent_bytes, c.count] for c in compiled_in(*args)
    )


def data_step(n):
    def step(w, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - lax.psum(grad, "data")

    shapes = (WIDTH, WIDTH), (n * ROWS, WIDTH)
    return found_in(step, make_mesh(data=n), (P(), P("data")), P(), *shapes)


def fsdp_step(n):
    def step(w, x):
        def loss(w):
            layer = lambda h, w: (jnp.tanh(h @ lax.all_gather(w, "fsdp", tiled=True)), None)
            return jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

        return w - jax.grad(loss)(w)

    specs = P(None, "fsdp"), P("fsdp")
    shapes = (LAYERS, WIDTH, WIDTH), (n * ROWS, WIDTH)
    return found_in(step, make_mesh(fsdp=n), specs, P(None, "fsdp"), *shapes)


def ring_step(n):
    ring = [(i, (i + 1) % n) for i in range(n)]

    def step(x):
        turn = lambda c, _: ((lax.ppermute(c[0], "seq", ring), c[1] + jnp.tanh(c[0])), None)
        return lax.scan(turn, (x, x), length=n)[0][1]

    return found_in(step, make_mesh(seq=n), P("seq"), P("seq"), (n * ROWS, WIDTH))


def pipeline_step(n):
    stages, microbatches = n // 2, 5

    def step(w, x):
        chain = [(i, i + 1) for i in range(stages - 1)]

        def tick(i, c):
            return jnp.tanh(lax.ppermute(c, "stage", chain) @ w[0])

        return lax.fori_loop(0, microbatches + stages - 1, tick, x)

    mesh = make_mesh(data=2, stage=stages)
    specs = P("stage"), P("data")
    return found_in(step, mesh, specs, P("data"), (stages, WIDTH, WIDTH), (2 * ROWS, WIDTH))


def mixed_step(n):
    k = round(n ** (1 / 3))

    def step(up, down, x):
        up = lax.all_gather(up, "fsdp", tiled=True)
        for _ in range(2):
            x = lax.psum(jnp.tanh(x @ up) @ down, "tensor")
        return lax.pmean(jnp.sum(x), ("data", "fsdp")), lax.all_to_all(
            up, "tensor", split_axis=0, concat_axis=1, tiled=True
        )

    mesh = make_mesh(data=k, fsdp=k, tensor=k)
    specs = P("fsdp", "tensor"), P("tensor"), P(("data", "fsdp"))
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (k * k * ROWS, WIDTH)
    return found_in(step, mesh, specs, (P(), P(None, "tensor")), *shapes)


STEPS = {
    "data": data_step,
    "fsdp": fsdp_step,
    "ring": ring_step,
    "pipeline": pipeline_step,
    "mixed": mixed_step,
}


def truth(n):
    """Kind, axes, operand shape on one device, bytes sent, executions. f32 is 4 bytes."""
    w, rows = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    k = {8: 2, 64: 4}[n]
    shard = [WIDTH // n, WIDTH]
    return {
        "data": [["all-reduce", ["data"], [WIDTH, WIDTH], 2 * (n - 1) * w // n, 1]],
        # Once forward and once more in the rematerialised backward pass.
        "fsdp": [
            ["all-gather", ["fsdp"], shard, (n - 1) * w // n, LAYERS],
            ["all-gather", ["fsdp"], shard, (n - 1) * w // n, LAYERS],
            ["reduce-scatter", ["fsdp"], [WIDTH, WIDTH], (n - 1) * w // n, LAYERS],
        ],
        "ring": [["collective-permute", ["seq"], [ROWS, WIDTH], rows, n]],
        "pipeline": [["collective-permute", ["stage"], [ROWS, WIDTH], rows, 5 + n // 2 - 1]],
        "mixed": [
            ["all-gather", ["fsdp"], [WIDTH // k, WIDTH // k], (k - 1) * w // k**2, 1],
            # 2(n-1)/n of one number: 7 of 8 bytes on 4 devices, rounded up to 8 on 16.
            ["all-reduce", ["data", "fsdp"], [], {2: 6, 4: 8}[k], 1],
            ["all-reduce", ["tensor"], [ROWS, WIDTH], 2 * (k - 1) * rows // k, 1],
            ["all-reduce", ["tensor"], [ROWS, WIDTH], 2 * (k - 1) * rows // k, 1],
            ["all-to-all", ["tensor"], [k, WIDTH // k, WIDTH // k], (k - 1) * w // k**2, 1],
        ],
    }


@pytest.mark.parametrize("name", STEPS)
def test_collectives_on_8_devices_are_those_worked_out_by_hand(name):
    assert STEPS[name](8) == truth(8)[name]


def test_collectives_on_64_devices_are_those_worked_out_by_hand():
    run = subprocess.run(
        [sys.executable, __file__, "64"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == truth(64)


@pytest.mark.parametrize("axis, kind", [("data", "all-reduce"), ("tensor", "all-gather")])
def test_axes_are_right_on_a_mesh_whose_devices_are_shuffled(axis, kind):
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]]
    mesh = make_mesh(devices, data=4, tensor=2)
    move = {
        "all-reduce": lambda x: lax.psum(x, axis),
        "all-gather": lambda x: lax.all_gather(x, axis, tiled=True),
    }[kind]
    out = {"all-reduce": P(), "all-gather": P("data")}[kind]
    ((found_kind, found_axes, *_),) = found_in(move, mesh, P("data"), out, (8, 4))
    assert (found_kind, found_axes) == (kind, [axis])


def test_a_mesh_that_names_the_same_devices_in_another_order_is_translated():
    devices = np.array(jax.devices())
    # In the program's mesh, neighbours along "b" are devices 0 and 4; in the one asked
    # about, these differ along "x".
    program = make_mesh(devices.reshape(2, 4).T.copy(), a=4, b=2)
    f = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=program, in_specs=P("a", "b"), out_specs=P("a")
    )
    x = jax.device_put(jnp.ones((4, 2)), NamedSharding(program, P("a", "b")))
    compiled = jax.jit(f).lower(x).compile()
    (c,) = collectives(compiled, make_mesh(devices, x=2, y=4))
    assert c.axes == ("x",)
    (c,) = collectives(compiled, program)
    assert c.axes == ("b",)


def test_a_mesh_of_other_devices_is_refused():
    four = make_mesh(np.array(jax.devices())[:4], data=4)
    other = make_mesh(np.array(jax.devices())[4:], data=4)
    f = jax.jit(lambda x: x.sum(), in_shardings=NamedSharding(four, P("data")))
    with pytest.raises(ValueError) as e:
        collectives(f.lower(jnp.ones(8)).compile(), other)
    assert str(e.value) == (
        "The program runs on devices [0, 1, 2, 3], the mesh is of devices [4, 5, 6, 7]. Pass "
        "the mesh that the step was compiled for."
    )


def test_a_gather_of_scanned_layers_names_the_argument_that_it_moves():
    def layers(weights, x):
        layer = lambda h, w: (jnp.tanh(h @ lax.all_gather(w, "fsdp", tiled=True)), None)
        return lax.psum(jnp.sum(lax.scan(layer, x, weights)[0]), "fsdp")

    specs, shapes = (P(None, "fsdp"), P("fsdp")), ((3, 8, 8), (16, 8))
    found = compiled_in(layers, make_mesh(fsdp=8), specs, P(), *shapes)
    assert {(c.kind, c.argument) for c in found} == {
        ("all-gather", "weights"),
        ("all-reduce", ""),
    }


def test_what_a_loop_changes_is_no_longer_the_argument_it_began_with():
    def ring(x):
        turn = lambda i, c: lax.ppermute(c, "seq", [(k, (k + 1) % 8) for k in range(8)])
        return lax.fori_loop(0, 8, turn, x)

    (c,) = compiled_in(ring, make_mesh(seq=8), P("seq"), P("seq"), (8, 4))
    assert (c.kind, c.count, c.argument) == ("collective-permute", 8, "")


def test_a_loop_that_carries_one_array_changes_it_too():
    def until(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: lax.psum(c, "seq"), x)

    (c,) = compiled_in(until, make_mesh(seq=8), P("seq"), P("seq"), (8, 4))
    assert (c.kind, c.count, c.argument) == ("all-reduce", None, "")


def test_a_pmap_is_read_as_well():
    compiled = jax.pmap(lambda x: lax.pmean(x, "batch"), "batch").lower(jnp.ones((8, 4)))
    (c,) = collectives(compiled.compile(), {"batch": 8})
    assert (c.kind, c.axes, c.sent_bytes) == ("all-reduce", ("batch",), 28)


def test_automatic_partitioning_is_read_with_its_fused_reductions():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    weights = {"a": on("fsdp", "tensor"), "b": on("tensor", "fsdp")}
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])
    step = jax.jit(
        jax.grad(loss),
        in_shardings=(weights, on(("data", "fsdp"))),
        out_shardings=weights,
    )
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = collectives(step.lower({"a": shape, "b": shape}, shape).compile(), mesh)
    # Both gradients, a quarter each ([4, 4] of f32), are summed over `data` in the end.
    assert by_axis(found)[("data",)]["all-reduce"].bytes == 2 * 4 * 4 * 4
    assert {c.source.rpartition(":")[0] for c in found if c.kind == "all-reduce"} == {__file__}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    print(json.dumps({name: step(int(sys.argv[1])) for name, step in STEPS.items()}))
