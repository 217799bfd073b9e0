"""The structured training step."""

from ._mean import Mean as Mean
from ._state import TrainState as TrainState
from ._step import TrainStep as TrainStep
from ._step import make_train_step as make_train_step
