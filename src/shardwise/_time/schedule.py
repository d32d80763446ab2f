"""Runs a program's own order on streams: compute, and one for each kind of link."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from .._hlo import (
    Instruction,
    Module,
    between_slices,
    collective_kind,
    collective_parts,
    rendezvous,
)
from .links import Link
from .pricing import FREE, Price

COMPUTE = "compute"
COPY = "copy"
SPARSE = "sparse cores"
# These move data while something else computes, such as an offloaded activation to the host.
_MOVES = ("fusion-start", "dynamic-slice-start", "dynamic-update-slice-start", "slice-start")
# Loops are drawn for this many iterations; the others take as long as the last one drawn.
DRAWN = 2


class Pricer(Protocol):
    """Prices the instructions of a program on one kind of chip."""

    def price(self, computation: str, instruction: Instruction) -> Price:
        """Returns what one run of an instruction costs."""
        ...

    def estimates(self, fusion: Instruction) -> bool:
        """Returns whether a fusion with a collective in it computes something too."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One instruction on a stream.

    Attributes:
        instruction: what runs.
        computation: where it stands.
        stream: `compute`, or the link that it runs over.
        start: seconds since the step began.
        seconds: how long it takes.
        times: how many times a step runs it like this.
        price: what it costs alone.
        axes: the mesh axes that a collective runs over.
        exposed: seconds that the compute stream waits for it.
    """

    instruction: Instruction
    computation: str
    stream: str
    start: float
    seconds: float
    times: int
    price: Price
    axes: tuple[str, ...] = ()
    exposed: float = 0.0


@dataclasses.dataclass(slots=True)
class _Flight:
    end: float
    place: int  # of its slice


class Schedule:
    """One step of a program on a device.

    Attributes:
        slices: what ran when, loops for a few iterations.
        seconds: when the last stream ends.
        gaps: `(start, seconds, times)` of what stands for the iterations that are not drawn.
    """

    def __init__(
        self,
        module: Module,
        pricer: Pricer,
        link: Callable[[str, float, Sequence[Sequence[int]]], Link],
        mesh: Mapping[str, int],
        *,
        iteration: float = 0.0,
        scale: Callable[[Price], float] = lambda price: 1.0,
    ):
        """Runs the program.

        Args:
            module: the program.
            pricer: what its instructions cost.
            link: how long a collective takes, by kind, bytes and groups.
            mesh: the sizes of the mesh's axes by name.
            iteration: seconds that each iteration of a loop adds.
            scale: a factor for each price, such as 0 for what is to be free.
        """
        self.module, self.pricer, self.link, self.mesh = module, pricer, link, dict(mesh)
        self.iteration, self.scale = iteration, scale
        self.slices: list[Slice] = []
        self.gaps: list[tuple[float, float, int]] = []
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.flights: dict[tuple[str, str], _Flight] = {}
        self.pending: dict[tuple[str, str], Instruction] = {}
        self.prices: dict[tuple[str, str], Price] = {}
        self.links: dict[tuple[str, str], tuple[Link, tuple[str, ...], int]] = {}
        self.fused: dict[str, Instruction | None] = {}
        self.chains: dict[str, dict[str, str]] = {}
        self._run(module.entry, 1)
        self.seconds = max([self.now, *self.free.values()])

    def _run(self, computation: str, times: int) -> None:
        for instruction in self.module.computations.get(computation, ()):
            opcode = instruction.opcode
            if opcode == "while":
                self._loop(computation, instruction, times)
            elif opcode == "call" and instruction.called:
                self._run(instruction.called[0], times)
            elif opcode in ("async-start", "call-start") and instruction.called:
                self._async(computation, instruction, times)
            elif opcode in ("async-update", "call-update"):
                self._update(computation, instruction, times)
            elif opcode == "conditional":
                # Which branch runs is not known: the first one, as for a flag that is set.
                self._run(instruction.called[0], times)
            elif opcode.endswith("-done"):
                self._wait(computation, instruction)
            elif opcode == "fusion" and (inner := self._fused(instruction)) is not None:
                self._fusion(computation, instruction, inner, times)
            elif opcode == "recv" and rendezvous(instruction):
                continue  # what its `send` begins takes the time
            elif opcode in _MOVES:
                self._copy(computation, instruction, times)
            elif collective_kind(self.module, computation, instruction):
                self._collective(computation, instruction, times)
            else:
                self._compute(computation, instruction, times)

    def _async(self, computation: str, start: Instruction, times: int) -> None:
        if start.opcode == "call-start" and not start.operands:
            # A TPU gives such a call its operands later, in an update: there its work begins.
            self.pending[computation, start.name] = start
        else:
            self._offload(start, times, (computation, start.name))

    def _update(self, computation: str, update: Instruction, times: int) -> None:
        begun, key = (computation, update.operands[0]), (computation, update.name)
        if begun in self.pending:
            self._offload(self.pending.pop(begun), times, key)
        elif begun in self.flights:
            self.flights[key] = self.flights.pop(begun)

    def _offload(self, start: Instruction, times: int, key: tuple[str, str]) -> None:
        """Runs an asynchronous computation: one collective, or work beside the compute stream."""
        inner = start.called[0]
        work = list(self._inside(inner))
        for place, i in work:
            if collective_kind(self.module, place, i):
                self._launch(place, i, times, key)
                return
        if 'async_execution_thread="sparsecore"' not in start.rest:
            self._run(inner, times)
            return
        prices = [(self._price(place, i), place, i) for place, i in work]
        price, place, i = max(prices, key=lambda p: p[0].seconds, default=(FREE, "", start))
        if price is not FREE and price.seconds:
            self._fly(SPARSE, price, place, i, times, key)

    def _inside(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions of an asynchronous computation and of those that it wraps."""
        for instruction in self.module.computations.get(computation, ()):
            if instruction.opcode in ("call", "call-start", "async-start"):
                for inner in instruction.called:
                    yield from self._inside(inner)
            else:
                yield computation, instruction

    def _fused(self, fusion: Instruction) -> Instruction | None:
        """Returns the collective in a fusion: a TPU's reduce-scatter, or a part of a chain."""
        called = fusion.called[0] if fusion.called else ""
        if called not in self.fused:
            found = self.module.computations.get(called, ())
            self.fused[called] = next(
                (i for i in found if collective_kind(self.module, called, i)), None
            )
        return self.fused[called]

    def _fusion(
        self, computation: str, fusion: Instruction, collective: Instruction, times: int
    ) -> None:
        """Runs a fusion with a collective in it, beside what else it computes."""
        chain = _chain(collective)
        key = (computation, chain or fusion.name)
        if key not in self.flights:
            self._launch(fusion.called[0], collective, times, key)
        if self.pricer.estimates(fusion):
            self._compute(computation, fusion, times)
        # The parts of a chain hold one collective, which lands in the last of them.
        if not chain or self._last(computation, chain) == fusion.name:
            self._land(key)

    def _last(self, computation: str, chain: str) -> str:
        if computation not in self.chains:
            self.chains[computation] = {
                _chain(inner): i.name
                for i in self.module.computations[computation]
                if i.opcode == "fusion" and (inner := self._fused(i)) is not None
            }
        return self.chains[computation][chain]

    def _loop(self, computation: str, loop: Instruction, times: int) -> None:
        body = re.search(r"body=%?([\w.\-]+)", loop.rest)
        if body is None:
            return
        trips = self.module.trips(computation, loop) or 1
        last = 0.0
        drawn = min(trips, DRAWN)
        for number in range(drawn):
            begin = self.now
            rest = trips - drawn + 1 if number == drawn - 1 else 1
            self._run(body[1], times * rest)
            self._spend(self.iteration)
            last = self.now - begin
        if trips > drawn:
            skipped = (trips - drawn) * last
            self.gaps.append((self.now, skipped, trips - drawn))
            self._spend(skipped)

    def _spend(self, seconds: float) -> None:
        self.now += seconds

    def _price(self, computation: str, instruction: Instruction) -> Price:
        key = (computation, instruction.name)
        if key not in self.prices:
            price = self.pricer.price(computation, instruction)
            factor = self.scale(price) if price is not FREE else 1.0
            if factor != 1.0:
                price = dataclasses.replace(price, seconds=factor * price.seconds)
            self.prices[key] = price
        return self.prices[key]

    def _compute(self, computation: str, instruction: Instruction, times: int) -> None:
        price = self._price(computation, instruction)
        if price is FREE or not price.seconds:
            return
        self.slices.append(
            Slice(instruction, computation, COMPUTE, self.now, price.seconds, times, price)
        )
        self._spend(price.seconds + price.gap)

    def _copy(self, computation: str, instruction: Instruction, times: int) -> None:
        """Runs what moves slices while something else computes."""
        price = self._price(computation, instruction)
        if price is not FREE and price.seconds:
            key = (computation, instruction.name)
            self._fly(COPY, price, computation, instruction, times, key)

    def _collective(self, computation: str, instruction: Instruction, times: int) -> None:
        if between_slices(instruction):
            # It ends where what it brings is received.
            self._launch(computation, instruction, times, (computation, rendezvous(instruction)))
            return
        key = (computation, instruction.name)
        self._launch(computation, instruction, times, key)
        if not instruction.opcode.endswith("-start"):
            self._land(key)

    def _linked(
        self, computation: str, instruction: Instruction
    ) -> tuple[Link, tuple[str, ...], int]:
        """Returns what a collective runs over, its mesh axes, and its bytes."""
        key = (computation, instruction.name)
        if key not in self.links:
            kind = collective_kind(self.module, computation, instruction)
            size, groups, axes = collective_parts(self.module, computation, instruction, self.mesh)
            if all(len(set(group)) <= 1 for group in groups) or not size:
                self.links[key] = (Link("none", 0.0), axes, size)
            else:
                found = self.link(kind, size, groups)
                price = Price(found.seconds, "collective", size)
                found = dataclasses.replace(found, seconds=found.seconds * self.scale(price))
                self.links[key] = (found, axes, size)
        return self.links[key]

    def _launch(
        self, computation: str, instruction: Instruction, times: int, key: tuple[str, str]
    ) -> None:
        link, axes, size = self._linked(computation, instruction)
        if not link.seconds:
            return
        price = Price(link.seconds, "collective", size)
        self._fly(link.name, price, computation, instruction, times, key, axes)

    def _fly(
        self,
        stream: str,
        price: Price,
        computation: str,
        instruction: Instruction,
        times: int,
        key: tuple[str, str],
        axes: tuple[str, ...] = (),
    ) -> None:
        """Starts something on a stream as soon as the stream is free."""
        start = max(self.now, self.free.get(stream, 0.0))
        end = start + price.seconds
        self.free[stream] = end
        self.flights[key] = _Flight(end, len(self.slices))
        self.slices.append(
            Slice(instruction, computation, stream, start, price.seconds, times, price, axes)
        )

    def _wait(self, computation: str, done: Instruction) -> None:
        own = self.module.by_name[computation]
        for name in done.operands:
            received = own.get(name) if done.opcode == "recv-done" else None
            self._land((computation, rendezvous(received) if received is not None else name))

    def _land(self, key: tuple[str, str]) -> None:
        flight = self.flights.pop(key, None)
        if flight is None:
            return
        waited = max(0.0, flight.end - self.now)
        if waited:
            known = self.slices[flight.place]
            self.slices[flight.place] = dataclasses.replace(known, exposed=waited)
            self.now = flight.end


def _chain(collective: Instruction) -> str:
    """Returns what the parts of a collective that a TPU splits over several fusions share."""
    chain = re.search(r'chain_id="?(\w+)', collective.rest)
    channel = re.search(r"channel_id=(\d+)", collective.rest)
    return f"{chain[1]}/{channel[1] if channel else ''}" if chain else ""
