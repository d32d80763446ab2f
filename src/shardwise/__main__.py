"""`shardwise`, and `python -m shardwise`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first, whose flax.py or types.py would be imported.
    sys.path.append(sys.path.pop(0))

from ._base import end, end_on_signals, open_standard_streams


def main() -> None:
    """Runs the command line as a process: signals come first, before anything slow is imported."""
    open_standard_streams()
    end_on_signals()
    from ._cli import run

    end(run())


if __name__ == "__main__":
    main()
