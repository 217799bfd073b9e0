"""pmap-era code on today's JAX.

`from compat import pmap` keeps a program alive; `python -m compat run train.py` runs it
unchanged; `python -m compat check` and `fix` show and take the way out; `global_view` runs the
same step on a mesh.
"""

from compat._collectives import UnboundAxis as UnboundAxis
from compat._collectives import all_gather as all_gather
from compat._collectives import all_to_all as all_to_all
from compat._collectives import axis_index as axis_index
from compat._collectives import axis_size as axis_size
from compat._collectives import in_pmap as in_pmap
from compat._collectives import pmax as pmax
from compat._collectives import pmean as pmean
from compat._collectives import pmin as pmin
from compat._collectives import ppermute as ppermute
from compat._collectives import pshuffle as pshuffle
from compat._collectives import psum as psum
from compat._collectives import psum_scatter as psum_scatter
from compat._collectives import pswapaxes as pswapaxes
from compat._flax import get_metrics as get_metrics
from compat._flax import onehot as onehot
from compat._flax import pad_shard_unpad as pad_shard_unpad
from compat._flax import scan_in_dim as scan_in_dim
from compat._flax import shard as shard
from compat._flax import shard_prng_key as shard_prng_key
from compat._flax import stack_forest as stack_forest
from compat._flax import tree_map as tree_map
from compat._flax import tree_multimap as tree_multimap
from compat._global_view import global_view as global_view
from compat._install import Installed as Installed
from compat._install import host_count as host_count
from compat._install import host_id as host_id
from compat._install import install as install
from compat._place import device_put_replicated as device_put_replicated
from compat._place import device_put_sharded as device_put_sharded
from compat._place import first as first
from compat._place import local as local
from compat._place import prefetch_to_device as prefetch_to_device
from compat._place import replicate as replicate
from compat._place import unreplicate as unreplicate
from compat._pmap import pmap as pmap
from compat._stats import Move as Move
from compat._stats import reset_stats as reset_stats
from compat._stats import stats as stats

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "device_put_replicated",
    "device_put_sharded",
    "first",
    "get_metrics",
    "global_view",
    "host_count",
    "host_id",
    "in_pmap",
    "install",
    "Installed",
    "local",
    "Move",
    "onehot",
    "pad_shard_unpad",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "prefetch_to_device",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "replicate",
    "reset_stats",
    "scan_in_dim",
    "shard",
    "shard_prng_key",
    "stack_forest",
    "stats",
    "tree_map",
    "tree_multimap",
    "UnboundAxis",
    "unreplicate",
]
