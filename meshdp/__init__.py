"""Train any JAX pytree model on many devices, as exactly as on one."""

from . import parallel as parallel
from ._constrain import constrain as constrain
from ._distribute import BATCH_AXES as BATCH_AXES
from ._distribute import Distributed as Distributed
from ._distribute import distributed as distributed
from ._layout import Layout as Layout
from ._layout import by_path as by_path
from ._layout import check_specs as check_specs
from ._layout import fsdp as fsdp
from ._layout import replicate as replicate
from ._layout import specs as specs
from ._mesh import AXES as AXES
from ._mesh import make_mesh as make_mesh
from ._place import local_rows as local_rows
from ._place import pad_batch as pad_batch
from ._place import place as place
from ._place import shard_batch as shard_batch
from ._place import to_host as to_host
from .launch import initialize as initialize
from .loop import Batches as Batches
from .loop import Checkpoints as Checkpoints
from .loop import Console as Console
from .loop import Evaluation as Evaluation
from .loop import Fitted as Fitted
from .loop import JsonLines as JsonLines
from .loop import Preempted as Preempted
from .loop import Restored as Restored
from .loop import TensorBoard as TensorBoard
from .loop import Watchdog as Watchdog
from .loop import fit as fit
from .loop import prefetch as prefetch
from .loop import reshard as reshard
from .report import Collective as Collective
from .report import Device as Device
from .report import Report as Report
from .report import collectives as collectives
from .report import diff as diff_reports
from .report import report as report
from .report import report_compiled as report_compiled
from .train import BatchSize as BatchSize
from .train import Guard as Guard
from .train import Mean as Mean
from .train import Precision as Precision
from .train import TrainState as TrainState
from .train import TrainStep as TrainStep
from .train import ema as ema
from .train import ema_model as ema_model
from .train import find_batch_size as find_batch_size
from .train import make_train_step as make_train_step

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Batches",
    "BatchSize",
    "by_path",
    "check_specs",
    "Checkpoints",
    "Collective",
    "collectives",
    "Console",
    "constrain",
    "Device",
    "diff_reports",
    "Distributed",
    "distributed",
    "ema",
    "ema_model",
    "Evaluation",
    "find_batch_size",
    "fit",
    "Fitted",
    "fsdp",
    "Guard",
    "initialize",
    "JsonLines",
    "Layout",
    "local_rows",
    "make_mesh",
    "make_train_step",
    "Mean",
    "pad_batch",
    "place",
    "Precision",
    "Preempted",
    "prefetch",
    "replicate",
    "Report",
    "report",
    "report_compiled",
    "reshard",
    "Restored",
    "shard_batch",
    "specs",
    "TensorBoard",
    "to_host",
    "TrainState",
    "TrainStep",
    "Watchdog",
]
