"""Blocks that are plain functions on one device and parallel under a mesh."""

from ._attention import attention as attention
from ._attention import unzigzag as unzigzag
from ._attention import zigzag as zigzag
from ._experts import Routing as Routing
from ._experts import Rows as Rows
from ._experts import experts as experts
from ._experts import route as route
from ._megatron import megatron as megatron
from ._megatron import mlp as mlp
from ._megatron import self_attention as self_attention
from ._one_f_one_b import pipeline_loss as pipeline_loss
from ._pipeline import pipeline as pipeline
from ._schedule import bubble as bubble
from ._tensor import columns as columns
from ._tensor import cross_entropy as cross_entropy
from ._tensor import embed as embed
from ._tensor import row as row
