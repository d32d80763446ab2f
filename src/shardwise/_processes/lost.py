"""A lost process, named where a collective with it fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import FrameType

import jax

from .._base import public
from .peer_watch import WATCHES


@public
class LostProcess(RuntimeError):
    """Another process was lost or failed, so this one cannot continue.

    Attributes:
        processes: the indices of the processes that were lost.
    """

    def __init__(self, text: str, processes: tuple[int, ...]) -> None:
        super().__init__(text)
        self.processes = processes


def end_named(number: int, frame: FrameType | None) -> None:
    """Handles a signal to a process with a `LostProcess` on its way out: exits with its message.

    The launcher ends all others as soon as one is lost, while they may still be unwinding.
    """
    for watch in WATCHES:
        watch.end_lost()


def lost_processes(wait_seconds: float = 0) -> list[int]:
    """Returns the indices of lost processes; waits up to `wait_seconds` for the first loss.

    Example:
        >>> from shardwise._processes.lost import lost_processes
        >>> lost_processes()
        []
    """
    loss = WATCHES[0].find(wait_seconds) if WATCHES else None
    return list(loss.lost) if loss else []


@contextlib.contextmanager
def naming_lost_process(during: str = "") -> Iterator[None]:
    """Returns a context that turns XLA's error about a lost process into one that names it.

    Args:
        during: what is done inside, such as "step 12".

    Raises:
        LostProcess: a collective failed because another process is lost.

    Example:
        >>> from shardwise._processes import naming_lost_process
        >>> with naming_lost_process("step 12"):
        ...     pass
    """
    if not WATCHES:
        yield
        return
    watch = WATCHES[0]
    before, watch.inside_since = watch.inside_since, time.monotonic()
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        loss = watch.find_for(error)
        if loss is None:
            raise
        text = watch.settle(loss, during, _first_line(error))
        raise LostProcess(text, loss.lost) from error
    finally:
        watch.inside_since = before


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    # It is known by now why the state could not be used again: it is no mistake of the caller's.
    return "" if text.startswith("this state was donated") else text


@contextlib.contextmanager
def noting_failure() -> Iterator[None]:
    """Returns a context whose exception is reported to the others if this process then exits.

    For programs that catch their errors and turn them into an exit status.
    """
    try:
        yield
    except Exception as error:
        for watch in WATCHES:
            watch.failure = error
        raise
