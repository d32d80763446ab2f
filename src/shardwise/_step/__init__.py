"""The one training step that is planned, compiled and run."""

from .activations import named_activations as named_activations
from .batch import data_axes as data_axes
from .batch import local_spans as local_spans
from .batch import named_batch as named_batch
from .batch import require_batch as require_batch
from .batch import require_integers as require_integers
from .blueprint import Blueprint as Blueprint
from .blueprint import explained_tracing as explained_tracing
from .blueprint import gathered as gathered
from .blueprint import make_blueprint as make_blueprint
from .blueprint import on_mesh as on_mesh
from .bounds import Bound as Bound
from .bounds import index_bounds as index_bounds
from .bounds import row_bounds as row_bounds
from .named_optimizers import OPTIMIZERS as OPTIMIZERS
from .named_optimizers import with_optimizer as with_optimizer
from .scopes import module_paths as module_paths
from .scopes import scope_modules as scope_modules
from .state import NotFinite as NotFinite
from .state import TrainState as TrainState
from .state import named_arrays as named_arrays
from .state import require_not_donated as require_not_donated
from .state import show_array as show_array
