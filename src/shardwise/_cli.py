"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys

from . import _cli_compile, _cli_learn, _cli_plan, _cli_report, _cli_run
from ._cli_options import app

__all__ = ["_cli_compile", "_cli_learn", "_cli_plan", "_cli_report", "_cli_run", "app", "main"]


def main() -> None:
    """Runs the command line; every failure is one sentence on stderr and exit status 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = app(standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # as `shardwise plan … | head` does: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        # Typer's own errors (a wrong option, a missing argument) carry a ready message.
        ready = getattr(error, "format_message", None)
        # Some say in options what they say to Python in arguments.
        text = str(ready() if callable(ready) else getattr(error, "cli_text", error))
        if ready is None:
            from ._target import last_frame

            # The package's own errors are sentences, and need no class in front.
            own = isinstance(error, ValueError) or type(error).__module__.startswith("shardwise")
            kind = "" if own else f"{type(error).__name__}: "
            text = f"{kind}{text}{last_frame(error)}"
        print(f"shardwise: {' '.join(text.split())}", file=sys.stderr)
        status = 2
    sys.exit(status)
