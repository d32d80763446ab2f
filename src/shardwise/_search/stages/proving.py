"""What the chips' own compiler says of the best, and what would fit where nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..._base import count as counted
from ..._base import show_bytes, show_seconds
from ..._chips import parse_chips
from ..abilities import CHUNKS
from ..found import Candidate
from ..remembered import proof_of
from ..space import accumulations
from .pricing import first_line
from .ranking import Ranker, peak_of
from .topologies import after

# Of what a device can use, what an estimate may be over: the compiler decides.
_NEAR = 1.1


class Searcher(Ranker):
    """Ranks the layouts of one recipe, and proves the best."""

    def prove(self, count: int) -> None:
        """Compiles the best, until this many of them fit, and says where the ranking changed."""
        proved = 0
        for _ in range(3 * count):
            open_ones = [c for c in self._promising() if c.proof is None]
            if proved >= count or not open_ones:
                break
            self.check_time()
            proof = self._proved(open_ones[0])
            if proof is None:
                break
            proved += proof.fits
            self._compare(open_ones[0], proof)
            if not proof.fits:
                self._learn(open_ones[0], proof)

    def _learn(self, before: Candidate, after_: Candidate) -> None:
        """Keeps how far an estimate was off, and prices what takes less memory than this."""
        off = after_.peak_bytes / max(1, before.estimate.peak_bytes)
        self.swollen[before.chips] = max(off, self.swollen.get(before.chips, 1.0))
        lean = before
        if self.fixed.loss_chunks is None and before.loss_chunks == 1 and self.can.chunks:
            lean = self.price(dataclasses.replace(before.choice, loss_chunks=CHUNKS)) or before
        self.offload(lean)
        if self.fixed.accumulate is None:
            for number in accumulations(lean.samples, lean.choice.data_ways)[1:3]:
                self.price(dataclasses.replace(lean.choice, accumulate=number))

    def _expected(self, candidate: Candidate) -> float:
        """Returns the peak of a candidate, if its estimate is off as far as others were."""
        return candidate.estimate.peak_bytes * self.swollen.get(candidate.chips, 1.0)

    def _promising(self) -> list[Candidate]:
        """Returns what fits or nearly fits, by the estimate's own order."""
        near = [
            c
            for c in self.ranked()
            if c.proof is not None or c.estimate.peak_bytes <= _NEAR * c.estimate.capacity
        ]

        def order(c: Candidate) -> tuple[bool, float, str]:
            over = self._expected(c) > c.estimate.capacity
            return over, c.estimate.seconds / c.samples, c.choice.key

        return sorted(near, key=order)

    def _proved(self, candidate: Candidate) -> Candidate | None:
        """Returns a candidate with what the compiler says; None if there is no compiler."""
        proof = self.memory.proof(candidate.choice.key)
        if proof is None:
            self.progress(f"compiling {candidate.mesh} {candidate.strategy} for {candidate.chips}")
            try:
                compiled = self.maker.compiled(candidate.recipe, candidate.layout)
            except ValueError as error:
                # The compiler is not installed, or has no such topology: the ranking stands.
                self.note(f"nothing was compiled: {first_line(error)}")
                return None
            proof = proof_of(compiled, candidate.estimate)
            self.memory.keep(candidate.choice.key, proof)
        made = dataclasses.replace(candidate, proof=proof)
        self.known[candidate.choice] = made
        self.seen(made)
        return made

    def _compare(self, before: Candidate, after_: Candidate) -> None:
        name = f"{before.mesh} {before.strategy}"
        if before.estimate.fits is not False and not after_.fits:
            self.note(
                f"{name} does not fit: the compiler needs {show_bytes(after_.peak_bytes)}, "
                f"{show_bytes(before.peak_bytes)} were estimated"
            )
        off = after_.seconds / before.seconds - 1
        if abs(off) > 0.1:
            self.note(
                f"{name} takes {show_seconds(after_.seconds)} by its compiled program, "
                f"{off:+.0%} from the estimate"
            )

    def remedy(self, names: Iterable[str], *, prove: bool) -> None:
        """Looks for the least that would fit: more chips, or a smaller batch on these."""
        for name in names:
            if ":" not in name:
                continue
            # A mesh that is fixed is one of these chips alone.
            for chips in after(name)[:4] if self.fixed.mesh is None else []:
                if self._remedied(chips, prove=prove):
                    break
            self._shrink(name, prove=prove)

    def _remedied(self, chips: str, *, prove: bool) -> bool:
        """Returns whether something fits on these chips, and keeps the fastest as a remedy."""
        devices, samples = parse_chips(chips).device_count, self.samples(chips)
        if samples % devices and not {"model", "sequence"} & set(self.can.limits[0]):
            return False
        mine, self.known = self.known, {}
        self.rank(chips)
        found, self.known = self._first_fit(self.ranked(), prove=prove), mine
        return found

    def _first_fit(self, candidates: Sequence[Candidate], *, prove: bool) -> bool:
        """Keeps the first candidate that fits, by the compiler if it is to prove it."""
        for each in [c for c in candidates if c.fits][:3]:
            made = (self._proved(each) or each) if prove else each
            if made.fits:
                self.remedies.append(made)
                return True
        return False

    def _shrink(self, name: str, *, prove: bool) -> None:
        """Looks for the largest batch that fits on the chips that were asked for."""
        chips = str(parse_chips(name))
        here = [c for c in self.ranked() if c.chips == chips]
        if not here or self.fixed.batch_per_device == "free":
            return
        mine, self.known = self.known, dict(self.known)
        now: Candidate | None = min(here, key=peak_of)
        while now is not None and not now.fits and not now.samples % 2:
            now = self.price(
                dataclasses.replace(now.choice, samples=now.samples // 2, accumulate=1)
            )
            if now is not None and self._first_fit([now], prove=prove):
                break
        self.known = mine

    def finish(self) -> None:
        """Writes what was found to the cache, and says what was not priced.

        Raises:
            ValueError: nothing was, since the step itself cannot be traced.
        """
        self.memory.write()
        if self.memory.refused and self.dropped and not self.priced:
            raise ValueError(self.memory.refused)
        for reason, names in self.dropped.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.note(f"{names[0]}{more} dropped: {reason}")
        if self.too_large:
            self.note(
                f"{counted(len(self.too_large), 'mesh was', 'meshes were')} not priced: parameters "
                f"and optimizer state alone exceed a device's memory"
            )
