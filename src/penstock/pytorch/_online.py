"""Tuning during training: a state machine that gets the times of each stretch of steps, and says what to change.

    resting ── the job starves, or crowds its processors ──► trying ── better ──► keeps it, and continues from there
       ▲  └─── the step rate changes: forget what was tried   └────── not ─────► goes back, and tries the next thing
       └────── nothing is left to try

What counts is the step rate. A loader that takes processors or the GIL from the step slows the step and hides its own
wait, so the time in `next()` only says in which direction to look:

    starving (waits more than 5 % of the time)       more workers, a deeper queue, fewer workers
    crowded  (75 % of the processors, or the         fewer workers
              training thread waits for a core)
    neither                                          nothing

A change that costs more is kept only if it makes steps faster; one that costs less, if it does not make them slower.
What seems good enough, but within the noise of the steps, is tried for longer; what does not is given up at once.
Pure: no clock, no threads. `pytorch` measures, and applies the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

STARVING = 0.05
"""Share of the time in `next()` above which there is something to gain."""
CROWDED = 0.75
"""Share of the processors that the job may use before it backs off: the rest is for the system and for bursts."""
_NO_CORE = 0.10
"""Share of the time that the training thread may be ready without a core."""
_OWN_DOING = 0.40
"""If the job uses a smaller share of the processors, a lack of cores is other programs' fault: nothing here helps."""
_GAIN = 1.04
_NO_LOSS = 0.98
_CHANGED = 1.25
_PATIENCE = 2
"""Consecutive stretches that must differ before a resting job is tuned again."""
_SURE = 2.0
"""A ratio this many standard errors above its threshold is not luck."""
_MOST_TRIALS = 4
"""Stretches that a setting is tried for at most, however noisy the steps."""
_COMPUTING = 0.5
"""If workers compute, and do not wait, for a larger share of their time, more of them than processors are of no use."""
_CHEAP_SECONDS = 0.001
"""A batch that is made in less may well take longer to hand over."""
_MARGIN = 1.2
"""More workers than the mean requires, because batches are uneven."""


class Setting(NamedTuple):
    """What can be changed."""

    num_workers: int
    depth: int
    """Items computed ahead per worker."""

    def __str__(self) -> str:
        return f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}, {self.depth} ahead each"


class Stretch(NamedTuple):
    """What some consecutive steps took."""

    num_steps: int
    seconds: float
    wait_seconds: float
    produce_seconds: float
    """Time workers took to compute that many batches, summed over workers."""
    busy_share: float
    """Share of the processors that the job may use."""
    delay_share: float
    """Share of the time that the training thread was ready, but had no core."""
    error: float = 0.0
    """Standard error of the rate, as a share of it."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.num_steps / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """Share of the time in `next()`."""
        return self.wait_seconds / max(self.seconds, 1e-9)

    def and_then(self, later: Stretch) -> Stretch:
        """Both as one stretch."""
        seconds = max(self.seconds + later.seconds, 1e-9)
        mine, its = self.seconds / seconds, later.seconds / seconds
        return Stretch(
            self.num_steps + later.num_steps,
            seconds,
            self.wait_seconds + later.wait_seconds,
            self.produce_seconds + later.produce_seconds,
            mine * self.busy_share + its * later.busy_share,
            mine * self.delay_share + its * later.delay_share,
            math.hypot(mine * self.error, its * later.error),
        )

    @property
    def is_starving(self) -> bool:
        """Whether steps wait for data."""
        return self.wait_share > STARVING

    @property
    def is_crowded(self) -> bool:
        """Whether the job computes more than is good for the training thread."""
        lacks_core = self.delay_share > _NO_CORE and self.busy_share > _OWN_DOING
        return self.busy_share > CROWDED or lacks_core


_CONTENT = Stretch(1, 0.0, 0.0, 0.0, 0.0, 0.0)
"""What a job is assumed to be before anything is known: neither starving nor crowded, at any rate."""


class Bounds(NamedTuple):
    """What memory and processors allow."""

    most_workers: int
    most_depth: int


class Decision(NamedTuple):
    """A change, and why."""

    setting: Setting
    reason: str


class OnlineTuner:
    """Decides, stretch by stretch.

    Args:
        start: The current setting.
        num_cpus: Processors that the job may use.
        tunes_workers, tunes_depth: What may be changed.
        if_cheap: What the user can do when steps wait for batches that are made at once; said once.
    """

    def __init__(
        self,
        start: Setting,
        num_cpus: int,
        *,
        tunes_workers: bool = True,
        tunes_depth: bool = True,
        if_cheap: str = "",
    ) -> None:
        self.setting = start
        self._if_cheap = if_cheap
        self._num_cpus, self._tunes_workers, self._tunes_depth = num_cpus, tunes_workers, tunes_depth
        self._known: dict[Setting, Stretch | None] = {start: None}
        """Settings tried since the job last changed, with what was measured."""
        self._before: Setting | None = None
        """What to go back to if the setting being tried does not help."""
        self._num_trials = 0
        """Stretches with the setting being tried."""
        self._rest: Stretch | None = _CONTENT
        self._unlike_rest: list[Stretch] = []
        """The last consecutive stretches that differed from the one in which the job came to rest."""

    @property
    def is_resting(self) -> bool:
        """Whether nothing is left to try, for now."""
        return self._rest is not None

    def observe(self, stretch: Stretch, bounds: Callable[[], Bounds]) -> Decision | None:
        """What to change after a stretch of steps with the current setting; None means nothing."""
        if self._rest is not None and not self._has_changed(self._rest, stretch):
            return None
        known = self._learn(stretch)
        return self._try_next(known, bounds) if self._before is None else self._judge(self._before, known, bounds)

    def _learn(self, stretch: Stretch) -> Stretch:
        """What is known of the current setting: all its stretches, or only the last if it differs beyond the noise."""
        known = self._known[self.setting]
        if known is not None and abs(stretch.rate / known.rate - 1) < _SURE * math.hypot(known.error, stretch.error):
            stretch = known.and_then(stretch)
        self._known[self.setting] = stretch
        return stretch

    def _judge(self, before: Setting, stretch: Stretch, bounds: Callable[[], Bounds]) -> Decision | None:
        """Keep what is being tried, go back, or go on trying, which costs nothing as long as it looks good."""
        base = self._known[before]
        assert base is not None, "a setting is measured before it is changed"
        self._num_trials += 1
        ratio = stretch.rate / max(base.rate, 1e-9)
        costs_less = self.setting < before  # fewer workers, or as many with a shorter queue
        enough = _NO_LOSS if costs_less else _GAIN
        is_sure = ratio - enough >= _SURE * math.hypot(base.error, stretch.error)
        if ratio >= enough and not is_sure and self._num_trials < _MOST_TRIALS:
            return None
        self._before = None
        if ratio >= enough:
            return self._try_next(stretch, bounds)
        tried, self.setting = self.setting, before
        why = "slows steps down" if ratio < _NO_LOSS else "gains nothing"
        return Decision(before, f"back to {before}: {tried} {why} (x {ratio:.2f})")

    def _try_next(self, stretch: Stretch, bounds: Callable[[], Bounds]) -> Decision | None:
        found = self._propose(stretch, bounds) if stretch.is_starving or stretch.is_crowded else None
        if found is None:
            self._rest, self._unlike_rest = stretch, []
            return self._say_if_cheap(stretch)
        self._rest = None
        self._before, self._num_trials = self.setting, 0
        self.setting = found.setting
        self._known[found.setting] = None
        return found

    def _say_if_cheap(self, stretch: Stretch) -> Decision | None:
        """What the user could do, if nothing is left to try here; changes nothing."""
        produce = stretch.produce_seconds / stretch.num_steps
        if not self._if_cheap or not stretch.is_starving or not 0 < produce < _CHEAP_SECONDS:
            return None
        said, self._if_cheap = self._if_cheap, ""
        return Decision(
            self.setting,
            f"stays at {self.setting}: {_why(stretch)}, but a batch is made in {1e6 * produce:.0f} µs. {said}",
        )

    def _propose(self, stretch: Stretch, bounds: Callable[[], Bounds]) -> Decision | None:
        """The first change that has not been tried yet."""
        limits = bounds()
        more, deeper, fewer = self._more(stretch, limits), self._deeper(limits), self._fewer()
        if not stretch.is_starving:
            ways = [fewer]
        elif self.setting.num_workers > self._num_cpus and stretch.is_crowded:
            ways = [fewer, deeper, more]
        else:
            ways = [more, deeper, fewer]
        fresh = [setting for setting in ways if setting is not None and setting not in self._known]
        return Decision(fresh[0], f"{fresh[0]}, after {self.setting}: {_why(stretch)}") if fresh else None

    def _more(self, stretch: Stretch, limits: Bounds) -> Setting | None:
        """As many workers as it takes to keep up with the step, given how long batches take now."""
        workers, depth = self.setting
        step = max((stretch.seconds - stretch.wait_seconds) / stretch.num_steps, 1e-6)
        needed = math.ceil(_MARGIN * stretch.produce_seconds / stretch.num_steps / step)
        computed = stretch.busy_share * self._num_cpus * stretch.seconds
        if computed > _COMPUTING * stretch.produce_seconds:
            needed = min(needed, self._num_cpus)
        count = min(max(workers + 1, needed), limits.most_workers)
        return Setting(count, depth) if self._tunes_workers and count > workers else None

    def _deeper(self, limits: Bounds) -> Setting | None:
        workers, depth = self.setting
        deeper = min(2 * depth, limits.most_depth)
        return Setting(workers, deeper) if self._tunes_depth and workers and deeper > depth else None

    def _fewer(self) -> Setting | None:
        """One fewer; if there are far more than processors, as many as those."""
        workers, depth = self.setting
        count = self._num_cpus if workers > self._num_cpus + 1 else workers - 1
        return Setting(count, depth) if self._tunes_workers and count >= 1 else None

    def _has_changed(self, rest: Stretch, stretch: Stretch) -> bool:
        """Whether the job has changed since it came to rest, so that what was tried no longer means anything."""
        ratio = 1.0 if rest is _CONTENT else stretch.rate / max(rest.rate, 1e-9)
        is_other = stretch.is_starving > rest.is_starving or stretch.is_crowded > rest.is_crowded
        is_unlike = is_other or not 1 / _CHANGED < ratio < _CHANGED
        self._unlike_rest = [*self._unlike_rest, stretch] if is_unlike else []
        if len(self._unlike_rest) < _PATIENCE:
            return False
        self._known = {self.setting: self._unlike_rest[0]}
        return True


def _why(stretch: Stretch) -> str:
    if stretch.is_starving:
        return f"{100 * stretch.wait_share:.0f} % of the time is spent waiting for data"
    if stretch.busy_share > CROWDED:
        return f"{100 * stretch.busy_share:.0f} % of the processors are busy, and no step waits for data"
    return f"the training thread has no core for {100 * stretch.delay_share:.0f} % of the time"
