"""The training loop and its parts, each usable alone."""

from ._batches import Batches as Batches
from ._checkpoints import Checkpoints as Checkpoints
from ._evaluation import Evaluation as Evaluation
from ._fit import Fitted as Fitted
from ._fit import fit as fit
from ._prefetch import Prefetch as Prefetch
from ._prefetch import prefetch as prefetch
from ._reshard import reshard as reshard
from ._restore import Restored as Restored
from ._restore import shapes as shapes
from ._signals import Preempted as Preempted
from ._sinks import Console as Console
from ._sinks import JsonLines as JsonLines
from ._sinks import TensorBoard as TensorBoard
from ._watchdog import Watchdog as Watchdog
