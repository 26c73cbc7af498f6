"""Results as figures: who is best at what, by how much, and pictures of it.

For each measure the best setting of a library counts. Ratios are of the same rounds, because the machine changes
between rounds: their median is shown.
"""

from __future__ import annotations

import html
import importlib
import json
import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from _turns import HERE, RESULTS, Question

sys.path.insert(0, str(HERE.parent))
import bench_growth
from bench_growth import STYLE, slope

from penstock.report import format_bytes, format_number, format_seconds

DOCS = HERE.parents[1] / "docs"


@dataclass
class Best:
    """A library's best setting for one measure."""

    peer: str
    kind: str
    arm: Any
    values: list[float]
    others: dict[Any, float]
    """Medians of its other settings."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def setting(self) -> str:
        """In words, behind a comma."""
        return f", {self.arm}" if isinstance(self.arm, str) and self.arm else ""


@dataclass
class Measured:
    """One measure of one question: every library at its best, the best first."""

    question: Question
    unit: str
    bests: list[Best]

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return -1 if self.unit in ("s", "ms", "bytes", "MB") else 1

    def of(self, kind: str) -> Best | None:
        return next((best for best in self.bests if best.kind == kind), None)

    def gain(self, one: Best, other: Best) -> float:
        """How many times better one is than another, median over rounds."""
        return statistics.median((a / b) ** self.sign for a, b in zip(one.values, other.values, strict=False))

    def shown(self, value: float) -> str:
        known = {"s": format_seconds, "bytes": format_bytes}
        return known[self.unit](value) if self.unit in known else f"{format_number(value)} {self.unit}"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def question_of(name: str) -> Question:
    return importlib.import_module(name).QUESTION


def bests_of(question: Question, rows: list[dict[str, Any]], measure: str) -> Measured:
    """Where settings are sizes, the largest that Penstock and most peers reached is compared."""
    found = Measured(question, question.measures[measure], [])
    size = max((r["arm"] for r in rows if question.over and r["kind"] == "peer" and measure in r["values"]), default=0)
    for peer in dict.fromkeys(row["peer"] for row in rows):
        done = [r for r in rows if r["peer"] == peer and measure in r["values"]]
        done = [r for r in done if not question.over or r["arm"] == size]
        if done:
            medians = {row["arm"]: statistics.median(row["values"][measure]) for row in done}
            best = max(done, key=lambda row: found.sign * medians[row["arm"]])
            others = {arm: value for arm, value in medians.items() if arm != best["arm"]}
            found.bests.append(Best(peer, best["kind"], best["arm"], best["values"][measure], others))
    found.bests.sort(key=lambda best: -found.sign * best.median)
    return found


def bars(found: Measured, title: str, top: int) -> tuple[list[str], int]:
    """A bar for each library, with the range of its rounds."""
    most = max(max(best.values) for best in found.bests)
    parts = [f'<text x="4" y="{top + 16}">{title}</text>'] if title else []
    for place, best in enumerate(found.bests):
        y, scale = top + (26 if title else 4) + 24 * place, 330 / most
        kind = {"ours": 'class="teal"', "limit": 'class="line" opacity="0.6"'}.get(
            best.kind, 'fill="currentColor" opacity="0.45"'
        )
        low, high = 150 + scale * min(best.values), 150 + scale * max(best.values)
        parts += [
            f'<text class="small" x="142" y="{y + 13}" text-anchor="end">{html.escape(best.peer)}</text>',
            f'<rect {kind} x="150" y="{y + 2}" width="{max(1, scale * best.median):.1f}" height="14"/>',
            f'<path class="line" d="M{low:.1f} {y + 9}H{high:.1f}"/>',
            f'<text class="small" x="{high + 8:.1f}" y="{y + 13}">{found.shown(best.median)}{best.setting}</text>',
        ]
    return parts, top + (34 if title else 12) + 24 * len(found.bests)


def curves(question: Question, rows: list[dict[str, Any]], measure: str, top: int) -> tuple[list[str], int]:
    """Cost over size for each library, both axes logarithmic."""
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        if measure in row["values"]:
            line = lines.setdefault((row["peer"], row["kind"]), {})
            line[row["arm"]] = max(statistics.median(row["values"][measure]), 1e-9)
    sizes, costs = ([f(e) for line in lines.values() for e in line.items()] for f in (lambda e: e[0], lambda e: e[1]))
    left, right, low, high = (math.log10(e) for e in (min(sizes), max(sizes) + 1e-9, min(costs), max(costs)))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    shown = Measured(question, question.measures[measure], []).shown
    parts = [f'<text x="4" y="{top + 16}">{measure or question.title} over {question.over}</text>']
    for decade in range(low, high + 1):
        y = top + 230 - 200 * (decade - low) / (high - low)
        parts.append(f'<path class="faint" d="M110 {y:.0f}h330"/>')
        parts.append(f'<text class="small" x="102" y="{y + 4:.0f}" text-anchor="end">{shown(10.0**decade)}</text>')
    ends = []
    for (peer, kind), line in lines.items():
        points = [
            (
                110 + 330 * (math.log10(a) - left) / max(right - left, 1e-9),
                top + 230 - 200 * (math.log10(b) - low) / (high - low),
            )
            for a, b in sorted(line.items())
        ]
        mark = 'class="teal"' if kind == "ours" else 'fill="currentColor" opacity="0.6"'
        parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
        parts += [f'<circle {mark} cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points]
        growth = f", slope {slope(line):.2f}" if len(line) > 1 else ""
        ends.append((points[-1][1], f"{peer}: {shown(line[max(line)])}{growth}", points[-1][0]))
    y = 0.0
    for place, text, _ in sorted(ends):
        y = max(place, y + 15)
        parts.append(f'<text class="small" x="452" y="{y + 4:.1f}">{html.escape(text)}</text>')
    parts.append(f'<text class="small" x="110" y="{top + 250}">{format_number(min(sizes))}</text>')
    parts.append(f'<text class="small" x="440" y="{top + 250}" text-anchor="end">{format_number(max(sizes))}</text>')
    return parts, top + 272


def picture(name: str, title: str, parts: list[str], height: int) -> None:
    """A file of these parts beside the other pictures of the docs."""
    size = f'viewBox="0 0 720 {height}" width="720"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    text = f"{opening}{STYLE}{''.join(parts)}</svg>\n"
    (DOCS / "images" / f"side-by-side-{name}.svg").write_text(text, encoding="utf-8")


def draw_growth(rows: list[dict[str, Any]]) -> list[str]:
    """The picture of `bench_growth.py`, and its table."""
    costs = {each: {} for each in bench_growth.QUESTIONS}
    for row in rows:
        for each in costs:
            for value in row["values"].get(each.what, ()):
                costs[each][int(row["arm"].split()[0].replace(",", ""))] = value
    found = {each: values for each, values in costs.items() if values}
    (DOCS / "images/side-by-side-growth.svg").write_text(bench_growth.draw(found), encoding="utf-8")
    lines = ["| cost | over | from, to | slope |", "|---|---|---|---|"]
    for each, values in found.items():
        sizes = f"{min(values):,} to {max(values):,} {each.over}"
        lines.append(f"| {each.what} | {sizes} | {bench_growth.words(values, each.unit)} | {slope(values):.2f} |")
    return [*lines, ""]
