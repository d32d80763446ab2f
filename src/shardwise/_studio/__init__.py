"""The studio: one local page that asks what a layout would take, and answers while one looks."""

from .opening import InlineStudio as InlineStudio
from .opening import notebook_studio as notebook_studio
from .opening import open_studio as open_studio
from .source import Source as Source
from .source import applied as applied
from .source import first_mesh as first_mesh
from .state import State as State
from .state import parse_axes as parse_axes
from .state import parse_query as parse_query
