"""`shardwise`, and `python -m shardwise`."""

from ._base import end, end_on_signals, open_standard_streams


def main() -> None:
    """Runs the command line as a process: signals come first, before anything slow is imported."""
    open_standard_streams()
    end_on_signals()
    from ._cli import run

    end(run())


if __name__ == "__main__":
    main()
