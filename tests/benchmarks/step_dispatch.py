"""What it costs to call a step with a state of 1000 leaves, and whether the call waits.

    python tests/benchmarks/step_dispatch.py        (under a minute)

Against a bare `jax.jit` of the same function on the same leaves, shardings given, donated.
The leaves are scalars, so that there is hardly anything to compute. "Returns" is the call
alone, "done" the call and its work, in a chain of calls.
"""

import time

from _timing import Chain, compare, header, in_turns, prepare

prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import meshdp  # noqa: E402

leaves = 1000
rounds = 40
calls = 10  # in a round
mesh = meshdp.make_mesh()
split = NamedSharding(mesh, P(("data", "fsdp")))
everywhere = NamedSharding(mesh, P())


class Returns(Chain):
    """The seconds until a call returns; its work is waited for with the clock stopped."""

    def __call__(self) -> float:
        seconds = 0.0
        for _ in range(self.length):
            start = time.perf_counter()
            self.state, self.last = self.step(self.state, self.batch)
            seconds += time.perf_counter() - start
            jax.block_until_ready(self.state)
        return seconds / self.length


def add_one(state, batch):
    return [x + 1 for x in state], batch[0, 0]


def work(state, batch):
    return [jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x) for x in state], 0.0


def main() -> None:
    print(header())
    batch = meshdp.shard_batch(np.zeros((8, 1), np.float32), mesh)
    zeros = lambda: [jnp.zeros(()) for _ in range(leaves)]
    bare = jax.jit(
        add_one,
        in_shardings=(everywhere, split),
        out_shardings=(everywhere, everywhere),
        donate_argnums=0,
    )
    ours = meshdp.distributed(add_one, mesh=mesh, layout=meshdp.replicate())
    for name, kind in (("returns", Returns), ("done", Chain)):
        runs = {
            "meshdp.distributed": kind(ours, ours.init(zeros), batch, calls),
            "jax.jit": kind(bare, jax.device_put(zeros(), everywhere), batch, calls),
        }
        times = in_turns(runs, rounds)
        print(f"{leaves} leaves, {name}:\n{compare(times, 'meshdp.distributed')}")

    long = meshdp.distributed(work, mesh=mesh, layout=meshdp.replicate())
    state, _ = long(long.init(lambda: [jnp.eye(256)]), batch)
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, _ = long(state, batch)
    back = time.perf_counter() - start
    jax.block_until_ready(state)
    done = time.perf_counter() - start
    print(f"a long step's call returns after {back * 1e3:.1f} ms; done after {done * 1e3:.0f}")


if __name__ == "__main__":
    main()
