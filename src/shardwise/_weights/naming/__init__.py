"""Names: which key of a checkpoint goes to which leaf, and how; read from Python or TOML."""

from .names import Bound as Bound
from .names import Name as Name
from .names import NameMap as NameMap
from .names import Names as Names
from .names import names_toml as names_toml
from .names import read_names as read_names
