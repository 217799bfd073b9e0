"""Memory of `device_put_replicated` and `device_put_sharded` for 256 MB, against the recipe of
JAX's migration guide, which stacks everything on device 0.

Run: python tests/benchmarks/compat_placement_memory.py            (about a minute, 4 devices)

Each form runs in a process of its own. Two measures: bytes that the arrays alive on each
device hold at their peak, watched from a thread; and the peak of the whole process's memory
above what the result keeps (CPU devices are host memory).
"""

import resource
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np

devices, megabytes = 4, 256


class Watch(threading.Thread):
    """The most bytes that live arrays held on each device."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.done = Counter(), threading.Event()

    def run(self):
        import jax

        while not self.done.is_set():
            now, seen = Counter(), set()
            for x in jax.live_arrays():
                for s in x.addressable_shards if not x.is_deleted() else ():
                    at = s.data.unsafe_buffer_pointer()
                    if at not in seen:
                        seen.add(at)
                        now[s.device.id] += s.data.nbytes
            for d, n in now.items():
                self.peak[d] = max(self.peak[d], n)


def measure(form: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    import jax.numpy as jnp

    import compat

    where = jax.devices()
    x = np.ones((megabytes, 2**18), np.float32)  # 1 MB a row
    rows = np.split(x, devices)

    def guide(values):
        mesh = jax.sharding.Mesh(np.array(where), ("i",))
        sharding = jax.NamedSharding(mesh, jax.P("i"))
        return jax.device_put(jnp.stack(values), sharding)

    make = {
        "replicated": lambda: compat.device_put_replicated(x, where),
        "replicated_guide": lambda: guide([x] * devices),
        "sharded": lambda: compat.device_put_sharded(rows, where),
        "sharded_guide": lambda: guide(rows),
    }[form]
    jax.block_until_ready(compat.replicate(np.ones(4)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch = Watch()
    watch.start()
    out = jax.block_until_ready(make())
    watch.done.set()
    watch.join()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = out.nbytes / devices
    ratio = max(watch.peak.values()) / kept
    print(f"{form:17s} {ratio:5.2f} {(after - before) * 1024 / out.nbytes:5.2f}")


def main() -> None:
    import jax

    print(f"jax {jax.__version__}, {devices} CPU devices, {megabytes} MB")
    print("form              peak on the fullest device / kept there; process peak / result")
    for form in ("replicated", "replicated_guide", "sharded", "sharded_guide"):
        subprocess.run([sys.executable, __file__, form], check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
