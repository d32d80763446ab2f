"""The command line: one file per command, grouped as in its help."""

from .app import main as main
from .app import run as run
