"""How much a server is trusted: how long its answers took, and how the last request ended. Pure arithmetic on times.

    up ── another overtook it, ────► suspect ──── it answers ────► up
     │    or would by far
     │                                  │
     └──── it refuses, breaks off ──────┴────► down ──── met again, after a pause that doubles ────► up

A suspect server keeps what it was asked, is asked nothing new, and all of it is asked elsewhere. A server that is down
is asked what it serves, never for a batch: a batch would wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_REFUSED_PAUSE_SECONDS = 2.0
_MEMORY = 0.1
"""Weight of the newest answer in the mean."""
_PATIENCE = 4.0
"""How many mean answers a server may take for one before another is asked as well."""
_LEAST_PATIENCE_SECONDS, _MOST_DELAY_SECONDS = 0.25, 0.5
"""The least such time, and the most beyond a mean answer: waits stay bounded where answers take long."""


@dataclass(slots=True)
class Health:
    """What is known of one server. Times are seconds of one monotonic clock."""

    state: Literal["up", "suspect", "down"] = "up"
    reason: str = "not asked yet"
    """How the last request ended, in words."""
    is_refusal: bool = False
    """Whether it is there but will not serve us: another plan, a wrong token. Asking again soon is of no use."""
    mean_seconds: float | None = None
    """How long answers took."""
    asks_again_at: float = 0.0
    _pause_seconds: float = field(default=_FIRST_PAUSE_SECONDS)

    def patience_seconds(self) -> float:
        """How long one answer may take before another server is asked."""
        mean = self.mean_seconds or 0.0
        return max(_LEAST_PATIENCE_SECONDS, min(_PATIENCE * mean, mean + _MOST_DELAY_SECONDS))

    def met(self, expected_seconds: float) -> None:
        """It says that it serves the plan, and about how long an answer takes."""
        self.state, self.reason, self.is_refusal = "up", "answers", False
        if self.mean_seconds is None:
            self.mean_seconds = expected_seconds

    def answered(self, seconds: float) -> None:
        """It gave what it was asked for."""
        self.state, self.reason, self.is_refusal = "up", "answers", False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        mean = seconds if self.mean_seconds is None else self.mean_seconds
        self.mean_seconds = mean + _MEMORY * (seconds - mean)

    def overtaken(self) -> None:
        """It is late: another server, asked later, answered first, or would have by now."""
        if self.state == "up":
            self.state, self.reason = "suspect", "is slow to answer"

    def failed(self, now: float, reason: str, *, is_refusal: bool = False) -> None:
        """It cannot be reached, broke off, or refuses."""
        self.state, self.reason, self.is_refusal = "down", reason, is_refusal
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        self.asks_again_at = now + (_REFUSED_PAUSE_SECONDS if is_refusal else self._pause_seconds)

    def ask_at_once(self) -> None:
        """A new loop asks at once instead of waiting out an old pause: the server may be back."""
        self._pause_seconds, self.asks_again_at = _FIRST_PAUSE_SECONDS, 0.0
