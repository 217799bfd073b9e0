"""Each rule: what it must find."""

import textwrap

import pytest

from compat.migrate._check import check_source
from compat.migrate._rules import RULES

# (codes expected, in order; source). `jax.pmap` itself is MD123 and is left out below.
FIRES = [
    # MD101: through every style of import
    ("MD101", "import jax\njax.device_put_replicated(x, d)"),
    ("MD101", "import jax as j\nj.device_put_sharded(x, d)"),
    ("MD101", "from jax import device_put_replicated\ndevice_put_replicated(x, d)"),
    ("MD101", "from jax import device_put_sharded as put\nput(x, d)"),
    ("MD101", "import jax\nput = jax.device_put_sharded\nput(x, d)"),
    ("MD101", "def f():\n    import jax\n    return jax.device_put_sharded"),
    # MD102, MD103
    ("MD102", "import jax\njax.tree_map(f, x)"),
    ("MD102", "import jax\nmap(jax.tree_leaves, xs)"),
    ("MD102", "from jax import tree_map\ntree_map(f, x)"),
    ("MD102 MD102", "from jax import tree_flatten, tree_unflatten"),
    ("MD102", "import jax\nclass A:\n    jax = 1\n    def f(self): jax.tree_map"),
    ("MD103", "from jax import tree_util as tu\ntu.tree_multimap(f, x, y)"),
    ("MD103", "import jax\njax.tree_multimap(f, x, y)"),
    ("MD103", "from jax.tree_util import tree_multimap"),
    # MD104, MD105
    ("MD104 MD104", "import jax\njax.host_id() + jax.host_count()"),
    ("MD105 MD105", "import jax.tools.colab_tpu\njax.tools.colab_tpu.setup_tpu()"),
    ("MD105", "from jax.tools import colab_tpu"),
    # MD106
    ("MD106", "from jax.experimental.maps import xmap"),
    ("MD106 MD106", "from jax.experimental import maps\nmaps.Mesh(d, n)"),
    ("MD106", "import jax.experimental.maps as maps"),
    # MD107, MD120
    (
        "MD120 MD107",
        "from jax.experimental.pjit import pjit\npjit(f, in_axis_resources=a)",
    ),
    (
        "MD120 MD107",
        """
        from functools import partial
        from jax.experimental.pjit import pjit
        @partial(pjit, in_axis_resources=None, out_axis_resources=None)
        def f(x): return x
        """,
    ),
    ("MD120 MD107", "from jax.experimental.pjit import pjit\npjit(f, a, b)"),
    ("MD106", "from jax.experimental.maps import *"),
    # MD108 to MD110, MD115
    ("MD108", "from jax.sharding import PmapSharding"),
    ("MD108", "import jax\njax.sharding.PositionalSharding(d)"),
    ("MD109", "from jax.interpreters import pxla\npxla.parallel_callable"),
    ("MD109", "from jax.interpreters.xla import abstractify"),
    ("MD110", "from jax import core\ncore.Primitive('p')"),
    ("MD110", "import jax\njax.core.get_aval(x)"),
    ("MD115", "from jax.interpreters.pxla import ShardedDeviceArray"),
    ("MD115", "import jax.numpy as jnp\ndef f(x: jnp.DeviceArray): pass"),
    ("MD115", "import jax\nKey = jax.random.KeyArray"),
    # MD111, MD112
    ("MD111", "from jax.experimental.shard_map import shard_map"),
    ("MD112", "import jax\njax.shard_map(f, mesh=m, in_specs=p, out_specs=p, check_rep=False)"),
    ("MD112", "import jax\njax.shard_map(f, m, p, p)"),
    (
        "MD112",
        """
        import jax
        from functools import partial
        @partial(jax.shard_map, mesh=m, in_specs=p, out_specs=p, check_rep=False)
        def f(x): return x
        """,
    ),
    # MD113
    ("MD113", "from jax.sharding import Mesh\nm = Mesh(d, ('x',))\nwith m: f()"),
    ("MD113", "from jax.sharding import Mesh\nwith Mesh(d, ('x',)): f()"),
    ("MD113", "from jax.sharding import Mesh\ndef f(m: Mesh):\n    with m: pass"),
    # MD114
    ("MD114", "import jax\njax.config.update('jax_pmap_shmap_merge', True)"),
    ("MD114", "from jax import config\nprint(config.jax_pmap_no_rank_reduction)"),
    ("MD121 MD114", "from jax.config import config\nconfig.update('jax_array', True)"),
    # MD116 to MD119
    ("MD116", "import jax\ny = jax.jit(f)(x)\ny.device_buffers[0]"),
    ("MD117", "from compat import pmap\npmap(f, global_arg_shapes=s)"),
    ("MD118", "from jax import soft_pmap"),
    ("MD119", "from jax import core\ncore.axis_frame('i').size"),
    # MD121, MD122
    ("MD121", "import jax\njax.ops.index_update(x, i, y)"),
    ("MD121", "from jax.experimental import host_callback as hcb"),
    ("MD121", "from jax.lib import xla_bridge"),
    ("MD121", "import jax.numpy as jnp\njnp.product(x)"),
    ("MD121", "from jax.experimental import optimizers"),
    # MD201
    ("MD201", "import jax\njax.pmap(f, out_axes=-1)"),
    ("MD201", "import jax\njax.pmap(f, in_axes=(0, {'a': -1}))"),
    # MD202
    ("MD202", "import jax\njax.pmap(lambda x: x, static_broadcasted_argnums=1)"),
    (
        "MD202",
        """
        import jax, functools
        @functools.partial(jax.pmap, static_broadcasted_argnums=(0, 3))
        def f(config, x): return x
        """,
    ),
    (
        "MD202",
        """
        import compat
        class A:
            def f(self, x): pass
            def g(self):
                return compat.pmap(self.f, static_broadcasted_argnums=1)
        """,
    ),
    (
        "MD202",
        """
        import compat, functools
        def f(a, b): pass
        compat.pmap(functools.partial(f, 1), static_broadcasted_argnums=1)
        """,
    ),
    # MD203
    ("MD203", "import jax\njax.pmap(jax.pmap(f))"),
    ("MD203", "import jax\ndef f(x): return jax.pmap(g)(x)\njax.pmap(f)"),
    # MD204
    (
        "MD204",
        """
        import jax
        a = jax.pmap(f, devices=d[:4])(x)
        b = jax.pmap(f, devices=d[4:])(x)
        a + b
        """,
    ),
    (
        "MD204",
        """
        import jax, jax.numpy as jnp
        a = jax.pmap(f, devices=d[:4])(x)
        b = jax.pmap(f)(x)
        jnp.concatenate([a, b])
        """,
    ),
    # MD205
    ("MD205", "import jax\njax.pmap(f)(jax.device_put(x, jax.devices()[0]))"),
    (
        "MD205",
        """
        import jax
        p = jax.pmap(f)
        keys = p(jax.random.split(key, 8))
        p(jax.random.split(keys[0], 8))
        """,
    ),
    ("MD205", "import jax\np = jax.pmap(f)\ny = p(x)\np(y[:4])"),
    # MD206
    ("MD206", "import jax\njax.make_mesh((8,), ('x',))"),
    # MD207
    ("MD207", "import jax\np = jax.pmap(f, donate_argnums=0)\np(s, s)"),
    ("MD207", "import jax\np = jax.pmap(f, donate_argnums=(0,))\nt = p(s, b)\nprint(s)"),
    (
        "MD207",
        "import jax\np = jax.pmap(f, donate_argnums=0)\nfor b in bs:\n    out = p(s, b)",
    ),
    # MD301
    ("MD301", "import jax\ny = jax.pmap(f)(x)\nprint(float(y[0]))"),
    ("MD301", "import jax\np = jax.pmap(f)\ns, m = p(s, b)\nm['loss'][0]"),
    ("MD301", "import jax\np = jax.pmap(f)\ns = p(s, b)\nprint(s.step[0])"),
    (
        "MD301",
        """
        import jax
        class Trainer:
            def __init__(self):
                self.p = jax.pmap(f)
            def fit(self, x):
                self.y = self.p(x)
                return self.y['loss'][0]
        """,
    ),
    # MD302 to MD306
    ("MD302", "import jax\ns = jax.pmap(f)(x)\njax.tree.map(lambda x: x[0], s)"),
    ("MD303", "from flax import jax_utils\njax_utils.unreplicate(s)"),
    ("MD306", "from flax.jax_utils import replicate"),
    (
        "MD304",
        """
        import compat
        from flax.training import checkpoints
        s = compat.replicate(s)
        checkpoints.save_checkpoint(folder, s, 1)
        """,
    ),
    ("MD305", "import jax, jax.numpy as jnp\ny = jax.pmap(f)(x)\njnp.mean(y)"),
    # MD401
    (
        "MD401",
        """
        import jax
        def f(x): return jax.lax.pmean(x, 'data')
        jax.pmap(f, axis_name='batch')
        """,
    ),
    (
        "MD401",
        """
        import jax
        AXIS = 'rows'
        def inner(x): return jax.lax.psum(x, axis_name=AXIS)
        def f(x): return inner(x)
        jax.pmap(f, 'batch')
        """,
    ),
    # MD402
    ("MD402", "import jax\njax.pmap(lambda x: jax.lax.pmean(x, 'batch'))"),
    (
        "MD402",
        """
        from jax import pmap, lax
        @pmap
        def step(x): return lax.pmean(x, axis_name='batch')
        """,
    ),
    # MD403
    ("MD403", ("from jax import lax\nimport jax.numpy as jnp\n"
              "lax.pmean(jnp.sum(l * m) / jnp.sum(m), 'i')")),
    ("MD403", ("from jax import lax\nimport jax.numpy as jnp\n"
              "lax.pmean((l * m).sum() / jnp.maximum(m.sum(), 1), 'i')")),
    ("MD403", ("from jax import lax\nimport jax.numpy as jnp\n"
              "def f(x, m):\n    loss = jnp.mean(x, where=m)\n"
              "    return lax.pmean(loss, 'i')")),
    (
        "MD403",
        """
        import jax, jax.numpy as jnp
        def step(params, x, m):
            def loss_fn(params):
                return jnp.sum(params * x * m) / jnp.sum(m)
            loss, grads = jax.value_and_grad(loss_fn)(params)
            return jax.lax.pmean(grads, 'i')
        """,
    ),
    # MD404
    (
        "MD404",
        """
        import jax
        def step(w, x):
            def loss_fn(w):
                loss = (w * x).mean()
                return jax.lax.psum(loss, 'i')
            return jax.grad(loss_fn)(w)
        jax.pmap(step, 'i')
        """,
    ),
]  # fmt: skip


def codes(source):
    return [f.rule.code for f in check_source(textwrap.dedent(source))]


@pytest.mark.parametrize(("expected", "source"), FIRES)
def test_a_rule_fires(expected, source):
    assert [c for c in codes(source) if c != "MD123"] == expected.split()


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.pmap(f)",
        "from jax import pmap",
        "import jax\n@jax.pmap\ndef f(x): pass",
        "import jax, functools\nmapped = functools.partial(jax.pmap, axis_name='i')",
        "import jax\nm = jax.pmap if parallel else jax.vmap",
        "import jax\ntrain(mapper=jax.pmap)",
    ],
)
def test_the_use_of_jax_pmap_is_old_style(source):
    assert codes(source) == ["MD123"]


def test_a_name_that_a_later_jax_removes_is_old_style_for_this_one():
    source = "import jax\njax.core.gensym()"
    assert [f.rule.code for f in check_source(source, version=(0, 10))] == ["MD122"]
    assert [f.rule.code for f in check_source(source, version=(0, 12))] == ["MD110"]


def test_every_rule_fires_in_the_table_above():
    fired = {code for expected, _ in FIRES for code in expected.split()} | {"MD122", "MD123"}
    assert fired == set(RULES)


def test_a_finding_is_one_sentence_of_fact_and_one_of_advice():
    (finding,) = check_source("import jax\njax.device_put_sharded(x, d)")
    assert finding.what == (
        "jax.device_put_sharded is not in JAX 0.10 or later: it raises AttributeError."
    )
    assert finding.do == (
        "Use device_put_sharded of compat, or jax.device_put with a NamedSharding."
    )
    assert finding.span == (2, 0, 2, 22)


def test_an_unbound_axis_is_named_with_what_is_bound():
    (finding, _) = check_source(
        "import jax\njax.pmap(lambda x: jax.lax.pmean(x, 'data'), axis_name='batch')"
    )[::-1]
    assert finding.what == (
        "pmean is over axis 'data', and the pmap around it binds 'batch': "
        "NameError, on any JAX."
    )


def test_columns_count_characters_not_bytes():
    (finding,) = check_source("import jax\ns = 'é'; jax.tree_map(f, x)")
    assert finding.span == (2, 9, 2, 21)
