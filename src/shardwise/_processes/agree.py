"""Agreement: what every process must know before any of them continues.

Short values travel through the key-value store of JAX's distributed runtime, without devices, so
that a process that has failed can still tell the others, which would otherwise wait for it in a
collective. With a single process, all of this costs nothing.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from .._base import public
from .._jax import distributed_state
from .lost import LostProcess, naming_lost_process
from .peer_watch import WATCHES

_Error = TypeVar("_Error", bound=Exception)
_ROUNDS = itertools.count()
_POLL_MILLISECONDS = 500
# How long a file system may take to show all processes the same directory.
_STALE_SECONDS = 30.0
# How long a failed process waits for the others to notice: they may be in a collective.
_FAILED_SECONDS = 5.0


@public
class ProcessesDiffer(ValueError):
    """The processes of a run disagree on something that must be the same on all of them.

    Attributes:
        processes: the indices of the processes that differ from the others.
    """

    def __init__(self, text: str, processes: tuple[int, ...]) -> None:
        super().__init__(text)
        self.processes = processes


def exchange(topic: str, value: str) -> list[str]:
    """Returns the values of all processes, in process order.

    Args:
        topic: what is exchanged; the same on all processes.
        value: the value of this process.

    Raises:
        LostProcess: a process is lost, has failed, or is at another topic.

    Example:
        >>> from shardwise._processes import exchange
        >>> exchange("steps", "2, 4")
        ['2, 4']
    """
    if _count() == 1:
        return [value]
    place = _publish([topic, value])
    found = []
    with naming_lost_process(topic):
        for index in range(_count()):
            theirs, received = _read(place, index, topic)
            if theirs != topic:
                raise LostProcess(
                    f"{who(index)} is at {theirs!r} while process {distributed_state().process_id} is at "
                    f"{topic!r}: all processes must run the same program",
                    (index,),
                )
            found.append(received)
    return found


@contextlib.contextmanager
def together(doing: str) -> Iterator[None]:
    """Returns a context in which all processes succeed, or all fail.

    When one process raises an error inside, all raise: that process its own error, and the others
    a `LostProcess` that names it.

    Raises:
        LostProcess: another process failed inside.
    """
    if _count() == 1:
        yield
        return
    try:
        yield
    except LostProcess:
        raise
    except Exception as error:
        _publish_failure(doing, error)
        raise
    exchange(doing, "")


def require_same(topic: str, value: Any, *, shown: str, help: str) -> None:
    """Raises if a value differs between processes; all raise the same message.

    Args:
        topic: what is being done.
        value: the value of this process, as plain data.
        shown: a description of it, such as "sees no checkpoints".
        help: what to do.

    Raises:
        ProcessesDiffer: the values differ; the message names the odd processes.
    """
    rows = [json.loads(text) for text in exchange(topic, json.dumps([value, shown]))]
    odd = odd_ones([value for value, _ in rows])
    if len(odd) == 0:
        return
    usual = next(i for i in range(len(rows)) if i not in odd)
    more = f" ({len(odd) - 1} more differ too)" if len(odd) > 1 else ""
    text = f"{who(odd[0])} {rows[odd[0]][1]}{more}, while process {usual} {rows[usual][1]}: {help}"
    raise known_to_all(ProcessesDiffer(text, odd))


def agreed_steps(checkpoints: Any) -> list[int]:
    """Returns the steps of a `Checkpoints`, once all processes see the same ones.

    A shared file system may show a step to one process before another, so processes keep looking
    for a while until all see the same steps.

    Raises:
        CheckpointError: the processes do not share the directory.
        ProcessesDiffer: a process still sees different steps.
    """
    checkpoints.require_shared()
    until = time.monotonic() + _STALE_SECONDS
    while True:
        with together("listing the checkpoints"):
            steps = checkpoints.steps()
        # All processes leave the loop in the same round, since all decide from the same data.
        rows = exchange("comparing the lists of checkpoints", json.dumps(steps))
        late = exchange("waiting for the checkpoints", "late" if time.monotonic() > until else "")
        if len(set(rows)) == 1 or any(late):
            break
        time.sleep(_STALE_SECONDS / 20)
    numbers = ", ".join(map(str, steps))
    seen = f"{'step' if len(steps) == 1 else 'steps'} {numbers}" if steps else "no checkpoints"
    require_same(
        "comparing the checkpoints",
        steps,
        shown=f"sees {seen} in {checkpoints.directory}",
        help="the directory must be shared by all processes",
    )
    return steps


def odd_ones(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the indices of values that differ from the most common one (the first, if tied)."""
    texts = [json.dumps(v, sort_keys=True) for v in values]
    counts = collections.Counter(texts)
    usual = max(texts, key=lambda text: counts[text])  # the first, if tied
    return tuple(i for i, text in enumerate(texts) if text != usual)


def who(index: int) -> str:
    """Returns a process's name, with its host and pid if known."""
    return WATCHES[0].name_of(index) if WATCHES else f"process {index}"


def require_same_parts(mine: Mapping[str, str], what: Mapping[str, str], help: str) -> None:
    """Raises if any part differs between processes; the message names the first that does.

    Args:
        mine: this process's parts, each a short text or a digest.
        what: a description of each part.
        help: what to do.

    Raises:
        ProcessesDiffer: a part differs; all processes raise the same message.
    """
    values = [json.loads(text) for text in exchange("comparing the processes", json.dumps(mine))]
    for part in what:
        column = [value.get(part, "") for value in values]
        odd = odd_ones(column)
        if odd:
            usual = next(v for i, v in enumerate(column) if i not in odd)
            shown = _difference(column[odd[0]], usual)
            names = ", ".join(who(i) for i in odd[:3]) + (", …" if len(odd) > 3 else "")
            verb = "differ" if len(odd) > 1 else "differs"
            text = f"{names} {verb} from the others in {what[part]}{shown}: {help}"
            raise known_to_all(ProcessesDiffer(text, odd))


def _difference(theirs: str, usual: str) -> str:
    """Returns the pieces, joined by `; `, in which two texts differ; empty for digests."""
    if "=" not in usual:
        return ""
    pairs = itertools.zip_longest(theirs.split("; "), usual.split("; "), fillvalue="none")
    found = [f"{one} instead of {other}" for one, other in pairs if one != other]
    return f" ({'; '.join(found)})"


def _count() -> int:
    # Not jax.process_count(), which starts the backend: the device count may be configured later.
    if not jax.distributed.is_initialized():
        return 1
    return distributed_state().num_processes or 1


def _store() -> Any:
    return distributed_state().client


def _publish(value: Any, failed: bool = False) -> str:
    place = f"shardwise/agree/{next(_ROUNDS)}"
    text = json.dumps([*value, failed])
    _store().key_value_set(f"{place}/{distributed_state().process_id}", text)
    return place


def _read(place: str, index: int, topic: str) -> tuple[str, str]:
    """Waits for the value of a process; raises an error that names a process lost meanwhile."""
    while True:
        try:
            text = _store().blocking_key_value_get(f"{place}/{index}", _POLL_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if error.error_code_string != "DEADLINE_EXCEEDED":
                raise
            if WATCHES and (loss := WATCHES[0].find(0)):
                text = WATCHES[0].settle(loss, topic)
                raise LostProcess(text, loss.lost) from None
            continue
        theirs, received, failed = json.loads(text)
        if failed:
            text = f"{who(index)} failed while {theirs}: {received}"
            raise known_to_all(LostProcess(text, (index,)))
        return theirs, received


def _publish_failure(doing: str, error: Exception) -> None:
    """Publishes that this process failed, and waits briefly for the others to notice."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = f"{kind}{error}"
    until = time.monotonic() + _FAILED_SECONDS
    with contextlib.suppress(Exception):
        place = _publish([doing, text], failed=True)
        for index in range(_count()):
            left = max(1, int(1000 * (until - time.monotonic())))
            _store().blocking_key_value_get(f"{place}/{index}", left)
        # All have arrived: none of them is in a collective, and each will read it.
        known_to_all(error)


def known_to_all(error: _Error) -> _Error:
    """Returns the error, marked as known to all: no process is reported as lost because of it."""
    for watch in WATCHES:
        watch.agreed = error
    return error
