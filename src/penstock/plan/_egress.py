"""What the nodes of a run would fetch from an object store: `plan.egress`, `penstock simulate`.

    plan.uses of a node's ranks  ->  simulate_cache (`penstock.remote`)  ->  bytes and waits, epoch by epoch
    places of a batch's rows     ->  how well batches are mixed

Nothing is read but sizes in manifests. With lanes, nodes differ only in which shards they need, so four of them stand
for all; without, all need everything, and one does. One epoch more than is asked for is simulated: what a cache evicts
in an epoch depends on what the next one needs.

**How well batches are mixed**, at worst: as if the data were stored topic by topic, 20 of equal size. The variance of
their counts per batch is compared with that of batches drawn from everything. 1 is a full shuffle. Data stored in no
order is as well mixed as that, whatever the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import counted, whole_number
from penstock.plan._rows import RowSource
from penstock.plan._stages import LANE_GROUP
from penstock.shards import ShardFolder, TarStorage

if TYPE_CHECKING:
    from penstock.remote import CacheRun, Uses
    from penstock.report import Chart, Finding, Page

_NODES, _TOPICS, _BATCHES, _MOST_ROWS = 4, 20, 400, 1 << 14
_BINS, _LEAD_BATCHES = 120, 8
_WELL_MIXED, _MUCH_WAITING, _UNFAIR, _SHARDS_PER_LANE = 1.1, 0.01, 1.5, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressSettings:
    """What is simulated; `Plan.egress` describes it."""

    nodes: int
    ranks: int
    cache_bytes: int | None
    bandwidth: float | None
    step_seconds: float | None
    epochs: int

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks", "epochs"):
            whole_number("egress", name, getattr(self, name), at_least=1)
        for name in ("cache_bytes", "bandwidth", "step_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"egress({name}={value!r}): a positive, finite number is needed.")

    @property
    def world_size(self) -> int:
        """Training processes in all."""
        return self.nodes * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressOfEpoch:
    """What a node fetches in an epoch: means of the nodes that were simulated."""

    node_bytes: float
    lru_bytes: float
    """What it would fetch if the least recently used shard were evicted, as other caches do."""
    waited_seconds: float | None
    """None if no bandwidth or no step is given. The first epoch's has the wait for the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """What the nodes of a run fetch."""

    settings: EgressSettings
    lanes: int
    batch_rows: int
    data_bytes: int
    """Bytes of all shards."""
    num_shards: int
    needed_bytes: float
    """Bytes of the shards that a node needs in an epoch: a cache of that many fetches nothing after the first."""
    in_use_bytes: int
    """Bytes of the shards that a node reads within a few batches, so also where groups change: the least cache."""
    epochs: tuple[EgressOfEpoch, ...]
    epoch_steps: float
    first_wait_seconds: float | None
    """How long the first batch takes."""
    least_step_seconds: float | None
    """What a step must last for the bandwidth to be enough, in the epoch that fetches most."""
    variance: float | None
    """How well batches are mixed; None for a mixture."""
    simulated_nodes: tuple[int, ...]
    fetches: tuple[tuple[float, float], ...] = dataclasses.field(default=(), repr=False)
    """(seconds from the start, bytes) of the first node's fetches, if a bandwidth and a step are given."""

    @property
    def waits(self) -> bool:
        """Whether the nodes wait for more than 1 % of the time, after their first batch."""
        first = self.first_wait_seconds
        if first is None or self.settings.step_seconds is None:
            return False
        waited = sum(each.waited_seconds or 0.0 for each in self.epochs) - first
        return waited > _MUCH_WAITING * len(self.epochs) * self.epoch_steps * self.settings.step_seconds

    @property
    def is_enough(self) -> bool:
        """Whether cache and bandwidth are."""
        cache = self.settings.cache_bytes
        return not self.waits and (cache is None or cache >= self.in_use_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "fetches"}
        settings, epochs = dataclasses.asdict(self.settings), [dataclasses.asdict(each) for each in self.epochs]
        return {**shown, "settings": settings, "epochs": epochs, "is_enough": self.is_enough}

    def __str__(self) -> str:
        from penstock.report import align_figures

        return align_figures((each.value, each.label, "") for each in self.page("plan").headlines)

    def page(self, name: str) -> Page:
        """What people see."""
        from penstock.report import Fact, FigureTable, Headline, Page, format_bytes, format_number, format_seconds

        told, first, later = self.settings, self.epochs[0], self.epochs[-1]
        headlines = [
            Headline(value=format_bytes(first.node_bytes), label="a node fetches in the first epoch"),
            Headline(value=format_bytes(later.node_bytes), label="in each later one"),
            Headline(value=format_bytes(self.in_use_bytes), label="a cache holds at least"),
        ]
        if self.least_step_seconds is not None:
            headlines.append(
                Headline(value=format_seconds(self.least_step_seconds), label="shortest step that this bandwidth feeds")
            )
        if self.variance is not None:
            label = "variance of topics, at worst; 1: full shuffle"
            headlines.append(Headline(value=format_number(self.variance), label=label))
        rows = tuple(self._row(number, each) for number, each in enumerate(self.epochs))
        header = ("epoch", "a node fetches", "all nodes", "of the data", "with LRU", "waits")
        cache = "all that is needed" if told.cache_bytes is None else format_bytes(told.cache_bytes)
        facts = {
            "nodes": f"{told.nodes:,} of {counted(told.ranks, 'rank')}",
            "cache": cache,
            "bandwidth": "–" if told.bandwidth is None else f"{format_bytes(told.bandwidth)}/s",
            "step": "–" if told.step_seconds is None else format_seconds(told.step_seconds),
            "data": format_bytes(self.data_bytes),
        }
        total = format_bytes(first.node_bytes * told.nodes)
        findings = tuple(self._findings())
        who = f"{told.nodes:,} nodes fetch" if told.nodes > 1 else "The node fetches"
        ends = "" if self.is_enough else "; that is too much" if self.waits else "; the cache is too small"
        return Page(
            title=f"penstock simulate · {name}",
            verdict=f"{who} {total} in the first epoch"
            f" and {format_bytes(later.node_bytes * told.nodes)} in each later one{ends}.",
            tone="bad" if not self.is_enough else "plain" if findings else "good",
            headlines=tuple(headlines),
            tables=(FigureTable(title="Epoch by epoch", header=header, rows=rows),),
            findings=findings,
            charts=self._charts(),
            machine=tuple(Fact(name=name, value=value) for name, value in facts.items()),
            notes=(
                f"Simulated: {counted(len(self.simulated_nodes), 'node')} of {told.nodes:,}, which stand for all. What "
                "is read at a time and when follows from the plan, sizes from the manifests; requests that fail and "
                "are repeated are not counted.",
            ),
        )

    def _row(self, number: int, epoch: EgressOfEpoch) -> tuple[str, ...]:
        from penstock.report import format_bytes, format_seconds

        waited = "–" if epoch.waited_seconds is None else format_seconds(epoch.waited_seconds)
        share = f"{100 * epoch.node_bytes / max(1, self.data_bytes):.2f} %"
        sizes = (epoch.node_bytes, epoch.node_bytes * self.settings.nodes, epoch.lru_bytes)
        node, total, lru = map(format_bytes, sizes)
        return (str(number), node, total, share, lru, waited)

    def _findings(self) -> Iterator[Finding]:
        """What to change."""
        from penstock.report import Finding, format_bytes, format_seconds

        told, fair = self.settings, self.data_bytes / self.settings.nodes
        fetched, needed = self.epochs[0].node_bytes, self.needed_bytes
        shares = f"Each node needs {format_bytes(needed)}; a fair share is {format_bytes(fair)}."
        again = (
            f"Shards are fetched {fetched / max(1.0, needed):.1f} times in an epoch: without lanes, a small part of "
            "each, a storage window, is read at a time."
        )
        evidence = [shares] * (told.nodes > 1 and needed > _UNFAIR * fair)
        evidence += [again] * (self.lanes == 1 and fetched > _UNFAIR * needed)
        if evidence:
            yield Finding(
                id="lanes",
                title="Each node could fetch a part of the data alone, and once",
                evidence=tuple(evidence),
                change=f"shuffle(..., lanes={self._good_lanes()})",
                price="another order: the states of running jobs do not fit",
                link="docs/plans.md",
            )
        if told.cache_bytes is not None and told.cache_bytes < self.in_use_bytes:
            yield Finding(
                id="cache",
                title=f"The cache must hold {format_bytes(self.in_use_bytes)} at least",
                evidence=(
                    "So much is read within a few batches; fewer lanes per node, a smaller group or shards need less.",
                ),
            )
        elif told.cache_bytes is not None and self.epochs[-1].node_bytes > 0:
            yield Finding(
                id="fits",
                title=f"A cache of {format_bytes(self.needed_bytes)} would fetch nothing after the first epoch",
            )
        if self.waits:
            is_slow = (self.least_step_seconds or 0.0) > (told.step_seconds or 0.0)
            slow = f"The bandwidth is enough for steps of {format_seconds(self.least_step_seconds or 0.0)} or more."
            yield Finding(
                id="bandwidth",
                title="The nodes would wait for data",
                evidence=(slow if is_slow else "A larger cache has room for more of the shards that come next.",),
            )
        if self.variance is not None and self.variance > _WELL_MIXED:
            yield Finding(
                id="mixing",
                title=f"If topics are stored one after the other, their counts per batch vary {self.variance:.1f} times"
                " as much as under a full shuffle",
                evidence=(f"A batch has {self.batch_rows:,} rows. `plan.mixing()` measures the data itself.",),
                change="more lanes, or a larger group" if self.lanes > 1 else "a larger group, or lanes",
            )

    def _good_lanes(self) -> int:
        """The rows of a batch, which ranks divide; fewer where there are few shards, or there is little room."""
        world, nodes = self.settings.world_size, self.settings.nodes
        most = self.num_shards / _SHARDS_PER_LANE
        if self.settings.cache_bytes is not None:
            room = self.settings.cache_bytes * self.num_shards / max(1, self.data_bytes)
            most = min(most, nodes * room / (2 * LANE_GROUP))  # half of it for those that come
        return min(self.batch_rows, world * max(1, int(most // world)))

    def _charts(self) -> tuple[Chart, ...]:
        from penstock.report import Chart

        if not self.fetches or self.settings.bandwidth is None:
            return ()
        seconds, sizes = np.array(self.fetches).T
        edges = np.linspace(0, max(seconds[-1], 1e-9), _BINS + 1)
        rates = np.histogram(seconds, edges, weights=sizes)[0] / np.diff(edges) / 1e9
        lines = {"fetched": rates, "bandwidth": np.full(_BINS, self.settings.bandwidth / 1e9)}
        return (Chart.of("What a node fetches", "GB/s", edges[1:], lines),)


UsesOfRanks = Callable[[int, Sequence[int]], "Uses"]
"""The uses of some ranks, from the run's first row up to another."""


def find_egress(
    settings: EgressSettings,
    rows: RowSource,
    batch_rows: int,
    lanes: int,
    folders: Sequence[ShardFolder | TarStorage],
    find_uses: UsesOfRanks,
) -> Egress:
    """The simulation of a plan with these rows."""
    from penstock.remote import most_in_use, simulate_cache

    told, num_rows = settings, rows.num_rows
    sizes = [np.array([shard.num_bytes for shard in folder.files], np.int64) for folder in folders]
    starts = np.cumsum([0, *map(len, sizes)])
    all_sizes = np.concatenate([np.empty(0, np.int64), *sizes])
    is_timed = told.bandwidth is not None and told.step_seconds is not None
    seconds_per_row = (told.step_seconds or 0.0) / batch_rows if is_timed else 0.0
    bandwidth = told.bandwidth or math.inf if is_timed else math.inf
    some = np.linspace(0, told.nodes - 1, min(told.nodes, _NODES if lanes > 1 else 1)).round().astype(int)
    nodes: list[tuple[CacheRun, CacheRun]] = []
    needed, in_use = [], 0
    for node in some.tolist():
        ranks = range(node * told.ranks, (node + 1) * told.ranks)
        uses = find_uses((told.epochs + 1) * num_rows, ranks)
        uses = dataclasses.replace(uses, folder=np.zeros_like(uses.folder), shard=starts[uses.folder] + uses.shard)
        first = np.unique(uses.shard[uses.first_row < num_rows])
        needed.append(int(all_sizes[first].sum()))
        in_use = max(in_use, most_in_use(uses, all_sizes, _LEAD_BATCHES * batch_rows))
        room = int(all_sizes.sum()) if told.cache_bytes is None else told.cache_bytes
        run = simulate_cache(uses, all_sizes, room, bandwidth=bandwidth, seconds_per_row=seconds_per_row)
        fits = room >= int(all_sizes[np.unique(uses.shard)].sum())
        nodes.append((run, run if fits else simulate_cache(uses, all_sizes, room, by_recency=True)))
    epochs = []
    for epoch in range(told.epochs):
        fetched, by_lru = (
            np.mean([float(run.sizes[run.rows // num_rows == epoch].sum()) for run in runs])
            for runs in zip(*nodes, strict=True)
        )
        waits = [float(run.waits[run.rows // num_rows == epoch].sum()) for run, _ in nodes] if is_timed else None
        waited = None if waits is None else max(waits)
        epochs.append(EgressOfEpoch(node_bytes=float(fetched), lru_bytes=float(by_lru), waited_seconds=waited))
    run = nodes[0][0]
    is_shown = is_timed & (run.rows < told.epochs * num_rows)
    epoch_steps = num_rows / batch_rows
    most = max(each.node_bytes for each in epochs)
    return Egress(
        settings=told,
        lanes=lanes,
        batch_rows=batch_rows,
        data_bytes=int(all_sizes.sum()),
        num_shards=len(all_sizes),
        needed_bytes=float(np.mean(needed)),
        in_use_bytes=in_use,
        epochs=tuple(epochs),
        epoch_steps=epoch_steps,
        first_wait_seconds=float(run.waits[run.rows < batch_rows].sum()) if is_timed else None,
        least_step_seconds=None if told.bandwidth is None else most / told.bandwidth / max(epoch_steps, 1e-9),
        variance=measure_variance(rows, batch_rows),
        simulated_nodes=tuple(some.tolist()),
        fetches=tuple(zip(run.finished[is_shown].tolist(), run.sizes[is_shown].tolist(), strict=True)),
    )


def measure_variance(rows: RowSource, batch_rows: int) -> float | None:
    """The variance of topic counts per batch over that of a full shuffle, for data stored topic by topic."""
    size = min(batch_rows, _MOST_ROWS, rows.num_rows)
    if not size:
        return None
    firsts = np.random.default_rng(0).integers(0, rows.num_rows - size + 1, min(_BATCHES, rows.num_rows // size))
    places = rows.stored_at((firsts[:, None] + np.arange(size)).reshape(-1))
    if places is None:
        return None
    topics = np.minimum((places * _TOPICS).astype(np.int64), _TOPICS - 1).reshape(len(firsts), size)
    counts: NDArray[np.int64] = np.stack([np.bincount(batch, minlength=_TOPICS) for batch in topics])
    share = 1 / _TOPICS
    return float(((counts - size * share) ** 2).mean(axis=0).sum() / (_TOPICS * size * share * (1 - share)))
