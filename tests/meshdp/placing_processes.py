"""What each process does in test_place_processes.py: prints one JSON object at the end.

Each function of `CASES` runs on both processes, in order; the tests judge what it returns.
"""

import json
import traceback

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp import _jaxapi, _processes
from meshdp._mesh import make_mesh
from meshdp._place import local_rows, pad_batch, place, reshard, shard_batch, to_host

ME = jax.process_index()
VALUE = np.arange(96, dtype=np.float32).reshape(16, 6)
MINE = VALUE[8 * ME : 8 * ME + 8]
MESH = make_mesh(data=4, fsdp=2)
# Neighbours along the last axis are on different processes.
ACROSS = np.array(jax.devices()).reshape(2, 4).T
CROSS = Mesh(ACROSS, ("data", "tensor"))
LINE = Mesh(ACROSS.ravel(), ("data",))
FOUR = Mesh(ACROSS[:2], ("data", "tensor"))


def shards(x):
    """Where each shard of this process lies, and what it holds."""
    return {
        "shape": list(x.shape),
        "shards": [
            (
                [i.indices(n)[:2] for i, n in zip(s.index, x.shape, strict=True)],
                s.data.shape,
                s.data.tolist(),
            )
            for s in x.addressable_shards
        ],
    }


def memory(x):
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def words(call, kind=ValueError):
    try:
        call()
    except kind as e:
        return str(e)


def own_rows_become_the_global_batch():
    with jax.transfer_guard("disallow"):
        batch = shard_batch({"x": MINE, "n": 3, "scale": np.float32(2), "flag": True}, MESH)
    total = jax.jit(lambda b: jnp.sum(b["x"] * b["scale"]))(batch)
    return {
        "x": shards(batch["x"]),
        "total": float(total),
        "n": [s.data.tolist() for s in batch["n"].addressable_shards],
        "flag": batch["flag"],
        "spec": batch["x"].sharding == NamedSharding(MESH, P(("data", "fsdp"))),
    }


def device_arrays_and_keys_are_own_rows_too():
    keys = jr.split(jr.key(0), 16)
    batch = shard_batch({"x": jnp.asarray(MINE), "keys": keys[8 * ME : 8 * ME + 8]}, MESH)
    return {
        "x": shards(batch["x"]),
        "keys": shards(jr.key_data(batch["keys"])),
        "want": jr.key_data(keys).tolist(),
    }


def processes_that_share_rows_pass_the_same():
    return shards(shard_batch(VALUE, CROSS, P("data")))


def whole_rows_are_passed_also_where_columns_are_split_over_processes():
    return shards(shard_batch(VALUE, CROSS, P("data", "tensor")))


def rows_of_a_process_may_lie_apart():
    mine = VALUE.reshape(8, 2, 6)[ME::2].reshape(8, 6)
    batch = shard_batch(mine, LINE, P("data"))
    return {"x": shards(batch), "back": local_rows(batch).tolist()}


def a_batch_changed_afterwards_keeps_its_values():
    mine = MINE.copy()
    batch = shard_batch(mine, MESH)
    mine[...] = -1
    return shards(batch)


def a_batch_that_is_global_already_is_laid_out_as_asked():
    x = shard_batch(MINE, MESH)
    same = shard_batch({"x": x}, MESH, share=True)["x"]
    other = shard_batch({"x": x, "y": MINE}, MESH, P("data"))
    return {"same": same is x, "x": shards(other["x"]), "y": shards(other["y"])}


def padded_rows_are_masked():
    rows = MINE[: 8 - ME]
    batch, mask = pad_batch({"x": rows}, 4)
    batch = shard_batch({**batch, "mask": mask}, MESH)
    return {"mask": float(jnp.sum(batch["mask"])), "x": shards(batch["x"])}


def unchanged_shapes_need_no_word_from_others():
    said = []
    real, _processes.say = _processes.say, lambda *a: said.append(a) or real(*a)
    for rows in (4, 4, 8, 8, 8):
        shard_batch({"only here": MINE[:rows]}, MESH)
    _processes.say = real
    return len(said)


def rows_come_back_as_they_were_passed():
    batch = shard_batch({"x": MINE, "n": np.int32(3), "host": MINE}, MESH)
    back = local_rows(batch)
    back["x"] += 1  # ours
    return {"x": (back["x"] - 1).tolist(), "n": back["n"].tolist()}


def whole_rows_are_missing_where_columns_are_elsewhere():
    tree = {"w": place(VALUE, NamedSharding(CROSS, P(None, "tensor"))), "b": VALUE}
    return words(lambda: local_rows(tree))


TREE = {
    "split": VALUE,
    "columns": VALUE.astype(jnp.bfloat16),
    "whole": VALUE + 1,
    "scalar": np.int32(7),
    "none": np.ones((0, 3), np.float32),
    "flags": VALUE % 2 == 0,
    "double": VALUE.astype(np.float64),
}
SPECS = {
    "split": P("data"),
    "columns": P(None, "tensor"),
    "whole": P(),
    "scalar": P(),
    "none": P("data"),
    "flags": P("data", "tensor"),
    "double": P(),
}


def cross():
    return {k: NamedSharding(CROSS, s) for k, s in SPECS.items()}


def values_are_placed_shard_by_shard():
    placed = place(TREE, cross())
    return {k: shards(x) for k, x in placed.items() if k != "columns"}


def whole_values_come_back_to_every_process():
    keys = jr.split(jr.key(3), 4)
    tree = {**place(TREE, cross()), "keys": place(keys, NamedSharding(CROSS, P("data")))}
    sizes = []
    real = _processes._all_gather
    chunk, _processes.CHUNK = _processes.CHUNK, 64
    _processes._all_gather = lambda x: sizes.append(x.nbytes) or real(x)
    back = to_host(tree)
    _processes._all_gather, _processes.CHUNK = real, chunk
    back["split"] += 0  # ours
    return {
        "values": {k: back[k].astype(np.float64).tolist() for k in TREE},
        "dtypes": {k: str(back[k].dtype) for k in TREE},
        "keys": jr.key_data(back["keys"]).tolist() == jr.key_data(keys).tolist(),
        "largest": max(sizes),
        "sent": sum(sizes),
    }


def what_all_processes_hold_does_not_travel():
    tree = place({"a": VALUE, "b": VALUE}, NamedSharding(CROSS, P("data")))
    real, _processes._all_gather = _processes._all_gather, None
    back = to_host(tree)
    _processes._all_gather = real
    return back["b"].tolist()


def python_numbers_stay_weakly_typed():
    x = place({"n": 0.5}, NamedSharding(MESH, P()))["n"]
    again = place(x, NamedSharding(MESH, P()))
    return [x.weak_type, float(x), again.weak_type, float(again)]


def donating_the_result_leaves_the_original_alone():
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    to = NamedSharding(MESH, P("data"))
    mine = VALUE.copy()
    first = place(mine, to)
    second = place(first, to)
    third = place(first, NamedSharding(MESH, P("fsdp")))
    apart = memory(first).isdisjoint(memory(second) | memory(third))
    double(second), double(third)
    mine[...] = -1
    return {"first": shards(first), "apart": apart}


def sharing_passes_arrays_in_place_through():
    x = place(VALUE, NamedSharding(MESH, P("data")))
    same = place(x, NamedSharding(MESH, P("data")), share=True)
    to = NamedSharding(Mesh(MESH.devices.reshape(4, 2), ("a", "b")), P("a"))
    renamed = place({"x": x, "y": VALUE}, to, share=True)
    return {
        "same": same is x,
        "renamed": memory(renamed["x"]) == memory(x) and renamed["x"].sharding == to,
        "y": shards(renamed["y"]),
    }


def layouts_and_meshes_change():
    x = place({"w": VALUE}, NamedSharding(MESH, P("data", "fsdp")))
    keys = place(jr.split(jr.key(0), 8), NamedSharding(MESH, P("data")))
    moved = reshard(x, NamedSharding(CROSS, P("tensor")))
    return {
        "same_devices": shards(reshard(x, NamedSharding(MESH, P("fsdp", None)))["w"]),
        "other_order": shards(moved["w"]),
        "fewer": shards(reshard(x, NamedSharding(FOUR, P("data", "tensor")))["w"]),
        "keys": shards(jr.key_data(reshard(keys, NamedSharding(FOUR, P("data"))))),
        "want": jr.key_data(jr.split(jr.key(0), 8)).tolist(),
    }


def donated_arrays_are_deleted_when_moved():
    tree = place({"a": VALUE, "b": VALUE}, NamedSharding(MESH, P("data")))
    moved = reshard(tree, NamedSharding(MESH, P("fsdp")), donate=True)
    return {"gone": [x.is_deleted() for x in tree.values()], "b": shards(moved["b"])}


def a_mesh_of_one_process_needs_no_other():
    local = make_mesh(data=4, devices=jax.local_devices())
    x = place(MINE, NamedSharding(local, P("data")))
    return {
        "x": shards(x),
        "batch": shards(shard_batch(MINE, local)),
        "back": to_host(x).tolist(),
    }


def different_values_are_refused():
    tree = {"w": VALUE + ME, "b": VALUE, "c": VALUE[: 4 * (ME + 1)], "n": 1}
    return words(lambda: place(tree, NamedSharding(MESH, P())))


def different_trees_are_refused():
    return words(lambda: place([VALUE] * (ME + 1), NamedSharding(MESH, P())))


def different_numbers_of_rows_are_refused():
    return words(
        lambda: shard_batch({"x": MINE[: 8 - 4 * ME], "y": MINE[:, 0][: 8 - 4 * ME]}, MESH)
    )


def rows_that_do_not_divide_on_one_process_are_refused_on_all():
    return words(lambda: shard_batch([MINE[: 8 - 2 * ME]], MESH))


def a_process_without_devices_is_refused():
    local = make_mesh(data=4, devices=jax.devices()[:4])
    return words(lambda: shard_batch(MINE, local)) if ME else None


def a_process_that_is_silent_is_named():
    _processes.WAIT = 0.5
    return words(lambda: shard_batch([MINE, MINE], MESH)) if ME == 0 else None


CASES = [
    f
    for name, f in list(globals().items())
    if callable(f) and getattr(f, "__module__", "") == "__main__" and name.count("_") > 1
]

results = {}
for case in CASES:
    try:
        results[case.__name__] = case()
    except Exception:
        results[case.__name__] = {"raised": traceback.format_exc()}
print(json.dumps(results))
# One process is still waited for: leave together.
_jaxapi.store_set(f"done/{ME}", "")
_jaxapi.store_get(f"done/{1 - ME}", 60)
