"""The page `docs/side-by-side.md` with its pictures, and the table of ratios in README: all numbers from `results/`.

For each measure the best setting of a library counts. Ratios are of the same rounds, because the machine changes
between rounds: their median is shown.
"""

from __future__ import annotations

import html
import importlib
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from _turns import HERE, RESULTS, Question

sys.path.insert(0, str(HERE.parent))
from bench_growth import STYLE, slope

from penstock.report import format_bytes, format_number, format_seconds

ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
QUESTIONS = ("windows", "pictures")
RATIOS = (("windows", "", "shuffled batches of 32 x 2,048 tokens, data in the page cache"),)
"""The rows of README's table: question, measure, and what was done."""


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


def table(found: Measured) -> list[str]:
    ours, has_settings = found.of("ours"), any(best.arm for best in found.bests) and not found.question.over
    lines = [f"| library |{' best setting |' if has_settings else ''} {found.unit} | from, to | Penstock's gain |"]
    lines += ["|---" * (5 if has_settings else 4) + "|"]
    for best in found.bests:
        rest = "; ".join(f"{arm}: {format_number(value)}" for arm, value in best.others.items())
        name = f"**{best.peer}**" if best.kind == "ours" else f"*{best.peer}*" if best.kind == "limit" else best.peer
        setting = f" {best.arm}{f' ({rest})' if rest else ''} |" if has_settings else ""
        gain = f"{found.gain(ours, best):.2f}" if ours and best is not ours else ""
        spread = f"{format_number(min(best.values))}, {format_number(max(best.values))}"
        lines.append(f"| {name} |{setting} {format_number(best.median)} | {spread} | {gain} |")
    return lines


def verdicts(found: Measured, what: str) -> list[str]:
    """Sentences: limit, best peer, and who is ahead."""
    ours, peer, limit = found.of("ours"), found.of("peer"), found.of("limit")
    if ours is None or peer is None:
        return []
    said = [f"{what}Penstock{ours.setting}: {found.shown(ours.median)}"]
    if limit:
        said += [f"{found.gain(ours, limit):.2f} of the limit"]
    word = "times" if found.gain(ours, peer) >= 1 else "of"
    return [f"{', '.join(said)}, {found.gain(ours, peer):.2f} {word} the best peer ({peer.peer}{peer.setting})."]


def losses(name: str, found: Measured, measure: str) -> list[str]:
    ours = found.of("ours")
    ahead = [best for best in found.bests if best.kind == "peer" and ours and found.gain(ours, best) < 0.995]
    return [
        f"[{found.question.title}](#{name}){f', {measure}' if measure else ''}: {best.peer}"
        f"{best.setting} is {1 / found.gain(ours, best):.2f} times better."
        for best in ahead
    ]


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


def draw(name: str, number: int) -> tuple[list[str], list[str], list[str]]:
    """Lines of the page, and of its summary, and where others are ahead; and the picture."""
    result, question = read(name), question_of(name)
    parts, top, below, behind, summary = [], 0, [], [], []
    for measure in question.measures:
        found = bests_of(question, result["rows"], measure)
        if not found.bests:
            continue
        add = curves(question, result["rows"], measure, top) if question.over else bars(found, measure, top)
        parts, top = parts + add[0], add[1]
        below += [*([f"**{measure}**", ""] if measure else []), *table(found), ""]
        said = verdicts(found, f"{measure}: " if measure else "")
        behind += losses(name, found, measure)
        summary += [f"| [{question.title}](#{name}) | {sentence} |" for sentence in said]
    size = f'viewBox="0 0 720 {top}" width="720"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{question.title}">'
    picture = DOCS / "images" / f"side-by-side-{name}.svg"
    picture.write_text(f"{opening}{STYLE}{''.join(parts)}</svg>\n", encoding="utf-8")
    errors = [
        f"`{row['error'].replace('`', '')}`: {row['peer']} {row['arm']}" for row in result["rows"] if row["error"]
    ]
    page = [f"## {question.title} {{#{name}}}", "", f"{question.same}", ""]
    page += [f"![{question.title}: every library at its best](images/side-by-side-{name}.svg)", "", *below]
    page += [f"- **Limit.** {question.limit}", f"- **Why.** {question.why}"]
    page += [f"- **Where Penstock loses.** {' '.join(behind) if behind else 'Nowhere here.'}"]
    page += ["- **Did not run.** " + "; ".join(errors) + "."] if errors else []
    page += [
        f"- `make bench-peers QUESTION={number}`, {format_seconds(result['seconds'])}; `benchmarks/peers/{name}.py`.",
        "",
    ]
    return page, summary, behind


def draw_all() -> None:
    """The page of all questions that have results, and README's table."""
    there = {name: number for number, name in enumerate(QUESTIONS, 1) if (RESULTS / f"{name}.json").exists()}
    drawn = [draw(name, number) for name, number in there.items()]
    results = [read(name) for name in there]
    machine = ", ".join(f"{key} {value}" for key, value in results[-1]["machine"].items())
    versions = dict(sorted({pair for result in results for pair in result["versions"].items() if pair[0] != "numpy"}))
    behind = [line for _, _, each in drawn for line in each]
    lines = [
        "# Side by side",
        "",
        "Penstock and what else people use, on the same data, in turns, each with the best of its settings: medians",
        "over rounds. A gain is Penstock over another, of the same rounds. Caches are warm unless a question says so.",
        "",
        "```sh",
        "make bench-peers                 # all of it",
        "make bench-peers QUESTION=1      # one question",
        "```",
        "",
        "| question | answer |",
        "|---|---|",
        *(line for _, summary, _ in drawn for line in summary),
        "",
        f"Measured on: {machine}. Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        "## Where Penstock loses",
        "",
        *([f"- {line}" for line in behind] or ["Nowhere in this run."]),
        "",
        *(line for page, _, _ in drawn for line in page),
    ]
    (DOCS / "side-by-side.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    rows = ["| two cores | the best of the others | Penstock | times | measured by |", "|---|---|---|---|---|"]
    for name, measure, what in RATIOS:
        if name in there:
            found = bests_of(question_of(name), read(name)["rows"], measure)
            ours, peer = found.of("ours"), found.of("peer")
            if ours and peer:
                cells = (
                    f"{peer.peer}: {found.shown(peer.median)}",
                    found.shown(ours.median),
                    f"**{found.gain(ours, peer):.2f}**",
                )
                rows.append(f"| {what} | {' | '.join(cells)} | [{name}.py](benchmarks/peers/{name}.py) |")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    marked = "<!-- side by side -->\n" + "\n".join(rows) + "\n<!-- of `make bench-peers` -->"
    readme = re.sub(r"<!-- side by side -->.*?<!-- of `make bench-peers` -->", lambda _: marked, readme, flags=re.S)
    (ROOT / "README.md").write_text(readme, encoding="utf-8")
