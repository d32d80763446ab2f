"""`shardwise`, and `python -m shardwise`."""

import sys

from ._ending import end_on_signals, leave_to_kernel, open_standard_streams


def main() -> None:
    """Runs the command line as a process: signals come first, before anything slow is imported."""
    open_standard_streams()
    end_on_signals()
    from ._cli import run

    status = run()
    leave_to_kernel()
    sys.exit(status)


if __name__ == "__main__":
    main()
