"""The compilers as processes: what is installed, how they are run, and the cache of results."""

from .cache import cache_folder as cache_folder
from .cache import read_entry as read_entry
from .cache import write_entry as write_entry
from .installed import find_compiler as find_compiler
from .noise import start_backends as start_backends
from .run import CompileError as CompileError
from .run import Program as Program
from .run import absent_mesh as absent_mesh
from .run import compile_absent as compile_absent
from .run import compile_here as compile_here
from .run import watched_compilers as watched_compilers
