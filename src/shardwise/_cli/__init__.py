"""The command line: one file a command, in the groups of its help."""

from .app import main as main
from .app import run as run
