"""The page `docs/side-by-side.md`, and the table of ratios in README: all numbers are from `results/`."""

from __future__ import annotations

import re

from _figures import DOCS, Measured, bars, bests_of, curves, draw_growth, picture, question_of, read
from _turns import RESULTS, Question

from penstock.report import format_seconds

ROOT = DOCS.parent
QUESTIONS = (
    "windows",
    "packed",
    "planners",
    "text",
    "pictures",
    "starts",
    "workers",
    "costs",
    "cold",
    "growth",
    "service",
    "remote",
)
RATIOS = (
    ("windows", "", "shuffled batches of 32 x 2,048 tokens"),
    ("packed", "ahead of the loop", "tokens of packed documents, while a step runs"),
    ("text", "", "raw text to shards of tokens"),
    ("pictures", "tars", "JPEGs from tars, decoded, to batches"),
    ("starts", "resumed", "resuming in the middle of a large epoch"),
)
"""The rows of README's table: question, measure, and what was done."""


def anchor(question: Question) -> str:
    """Where its section is, in a link."""
    return re.sub(r"\W+", "-", question.title.lower())


def table(found: Measured) -> list[str]:
    ours, has_settings = found.of("ours"), any(best.arm for best in found.bests) and not found.question.over
    lines = [f"| library |{' best setting |' if has_settings else ''} median | from, to | Penstock's gain |"]
    lines += ["|---" * (5 if has_settings else 4) + "|"]
    for best in found.bests:
        rest = "; ".join(f"{arm}: {found.shown(value)}" for arm, value in best.others.items())
        name = f"**{best.peer}**" if best.kind == "ours" else f"*{best.peer}*" if best.kind == "limit" else best.peer
        setting = f" {best.arm}{f' ({rest})' if rest else ''} |" if has_settings else ""
        gain = f"{found.gain(ours, best):.2f}" if ours and best is not ours else ""
        low, median, high = (found.shown(value) for value in (min(best.values), best.median, max(best.values)))
        lines.append(f"| {name} |{setting} {median} | {low}, {high} | {gain} |")
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


def losses(found: Measured, measure: str) -> list[str]:
    ours = found.of("ours")
    ahead = [best for best in found.bests if best.kind == "peer" and ours and found.gain(ours, best) < 0.995]
    return [
        f"[{found.question.title}](#{anchor(found.question)}){f', {measure}' if measure else ''}: {best.peer}"
        f"{best.setting} is {1 / found.gain(ours, best):.2f} times better."
        for best in ahead
    ]


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
        behind += losses(found, measure)
        summary += [f"| [{question.title}](#{anchor(question)}) | {sentence} |" for sentence in said]
    if name == "growth":
        below = draw_growth(result["rows"])
    else:
        picture(name, question.title, parts, top)
    errors = [
        f"{row['peer']} {row['arm']}: `{row['error'].replace('`', '')}`" for row in result["rows"] if row["error"]
    ]
    page = [f"## {question.title}", "", question.same, ""]
    page += [f"![{question.title}: every library at its best](images/side-by-side-{name}.svg)", "", *below]
    page += [f"- **Limit.** {question.limit}", f"- **Why.** {question.why}"]
    if question.measures:
        page += [f"- **Where Penstock loses.** {' '.join(behind) if behind else 'Nowhere here.'}"]
    page += [f"- **Did not run.** {error}" for error in errors]
    page += [f"- `make bench-peers QUESTION={number}` took {format_seconds(result['seconds'])}.", ""]
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
