"""What follows from how long a step takes, however that is known."""

from __future__ import annotations

from collections.abc import Mapping


class Speed:
    """The base of what says how long a step takes."""

    seconds: float
    tokens: int | None
    model_flops: int
    peak_flops: float

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own operations use, without recomputation."""
        return self.model_flops / (self.seconds * self.peak_flops) if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the global batch per second; None for a step without tokens."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def bound(self) -> str:
        """The part of the step that matters most."""
        costs = self._costs()
        return max(costs, key=lambda name: costs[name]) if costs else "unknown"

    def _costs(self) -> Mapping[str, float]:
        """Returns seconds by part of the step."""
        raise NotImplementedError
