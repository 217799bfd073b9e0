"""The structured training step."""

from ._batch_size import BatchSize as BatchSize
from ._batch_size import find_batch_size as find_batch_size
from ._ema import ema as ema
from ._ema import ema_model as ema_model
from ._guard import Guard as Guard
from ._mean import Mean as Mean
from ._precision import Precision as Precision
from ._state import TrainState as TrainState
from ._step import make_train_step as make_train_step
from ._train_step import TrainStep as TrainStep
