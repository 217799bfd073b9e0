"""Train any JAX pytree model on many devices, as exactly as on one."""

from ._constrain import constrain as constrain
from ._distribute import Distributed as Distributed
from ._distribute import distributed as distributed
from ._layout import Layout as Layout
from ._layout import by_path as by_path
from ._layout import check_specs as check_specs
from ._layout import fsdp as fsdp
from ._layout import replicate as replicate
from ._layout import specs as specs
from ._mesh import make_mesh as make_mesh
from .train import Mean as Mean
from .train import TrainState as TrainState
from .train import TrainStep as TrainStep
from .train import make_train_step as make_train_step
