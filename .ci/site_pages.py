"""Pages of the site that are made when it is built: the reference of names and of verbs, and the files beside README.

A hook of mkdocs (`hooks:` in mkdocs.yml). Nothing it makes is checked in, so nothing can be out of date: names come
from `penstock.__all__`, verbs from the parser behind `penstock --help`.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE_README = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
# What the rooms of public names are for, in the order in which someone meets them.
ROOMS = {
    "preparation": "Preparing data",
    "transforms": "Transforms",
    "sources": "Reading raw files",
    "plan": "Datasets and plans",
    "pytorch": "Loading",
    "masks": "Masks",
    "watching": "Watching",
    "tuning": "Settings",
    "dataset": "Where data should be",
    "service": "Servers",
    "shards": "Writing and checking shards",
    "schema": "Columns",
    "errors": "Errors",
}

FIRST = ("prepare", "Tokenize", "open")
# What rooms need of each other's classes, and users do not.
_OF_TRANSFORMS = "attributes before_run exact_columns identity input_columns notes open settings"
INTERNAL = {
    "DataLoader": "check_worker_number_rationality",
    "Dataset": "as_plan build_rows check_stage folders is_cheap_at_random map_seed order_facts samples "
    "select to_json with_stage",
    "Plan": "as_plan dont_need find_row folders has_own_epochs is_rectangular join_steps needs_isolation "
    "order_facts output_arrays replaces_rows row_source runs_python to_json token_budget will_need "
    "with_stage without_maps",
    "Schema": "parse_stored with_hashes",
    "Security": "check_server client_context server_context",
    "SourceOptions": "identity",
    **dict.fromkeys(("DecodeImage", "FunctionTransform", "KeepColumns", "Tokenize"), _OF_TRANSFORMS),
}
FRAMEWORKS = {
    "transformers": ("Trainer", "ModelLoader"),
    "trl": ("SFTTrainer",),
    "torchtitan": ("PlanDataLoader",),
    "lightning": ("DataModule", "LogLoader"),
    "checkpoint": ("RankState",),
    "scalars": ("LoaderScalars", "to_tensorboard"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those in docs/."""
    pages = {"reference/python.md": python_page(), "reference/cli.md": cli_page()}
    pages |= {name: from_docs((ROOT / name).read_text()) for name in BESIDE_README}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to the files beside README, which the site has a level below."""
    names = "|".join(map(re.escape, BESIDE_README))
    return re.sub(rf"\]\(\.\./((?:\.\./)*)({names})", r"](\1\2", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pictures as part of the page, where they take its colours; their own style is for other viewers.

    Code in tables may break behind its punctuation, so that columns fit on a phone; tables of more columns than fit
    there name the column in each cell, where `site.css` shows it.
    """
    html = re.sub(r"<table>.*?</table>", named_cells, html, flags=re.DOTALL)
    html = re.sub(r"<td[ >].*?</td>", breakable, html, flags=re.DOTALL)
    return re.sub(r'<img alt="([^"]*)" src="[^"]*images/([\w-]+\.svg)" ?/?>', picture, html)


def named_cells(table: re.Match[str]) -> str:
    """A table of more than two columns, with the column's name in each cell."""
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    if len(names) < 3:
        return table[0]
    columns = itertools.cycle(names)
    cells = re.sub(r"<td", lambda cell: f'<td data-column="{next(columns)}"', table[0])
    return cells.replace("<table>", f'<table data-columns="{len(names)}">')


def breakable(cell: re.Match[str]) -> str:
    """A table's cell whose code has places to break."""
    place = r"([.(,=/]|(?<=[a-z])_)(?=[a-zA-Z])"
    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", lambda code: re.sub(place, r"\1<wbr>", code[0]), cell[0])


def picture(found: re.Match[str]) -> str:
    """A picture of docs/images, to be read out as its description."""
    drawn = re.sub(r"<style>.*?</style>", "", (ROOT / "docs/images" / found[2]).read_text(), flags=re.DOTALL)
    return f'<span class="picture" role="img" aria-label="{found[1]}">{drawn}</span>'


def from_docs(text: str) -> str:
    """A page that stood beside docs/, with links as they are from within."""
    return re.sub(r"\]\(docs/", "](", text).replace("](README.md", "](index.md")


def public_names() -> dict[str, list[tuple[str, str]]]:
    """Each room's public names, with the names that they have there."""
    tree = ast.parse((ROOT / "src/penstock/__init__.py").read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If)).body
    found: dict[str, list[tuple[str, str]]] = {}
    for node in branch:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            room = name.name if node.module == "penstock" else str(node.module).removeprefix("penstock.")
            found.setdefault(room, []).append((name.asname or name.name, f"{node.module}.{name.name}"))
    return found


def python_page() -> str:
    """Every public name with its docstring, by room."""
    lines = [
        "# Python",
        "",
        "What `import penstock` offers, and what it has for frameworks. What is not here is private and may change.",
    ]
    names = public_names()
    for room in [*ROOMS, *(room for room in names if room not in ROOMS)]:
        if room in names:
            lines += ["", f"## {ROOMS.get(room, room.capitalize())}", ""]
            lines += [entry(name, home) for name, home in sorted(names[room], key=in_order_of_use)]
    lines += [
        "",
        "## Frameworks",
        "",
        "Imported by name, as in `from penstock.integrations.trl import SFTTrainer`.",
        "",
    ]
    lines += [framework_entry(module, name) for module, names_of in FRAMEWORKS.items() for name in names_of]
    return "\n".join(lines) + "\n"


def in_order_of_use(found: tuple[str, str]) -> tuple[bool, str]:
    """What people look for first in a room comes first, then the rest by name."""
    return found[0] not in FIRST, found[0]


def framework_entry(module: str, name: str) -> str:
    """The directive for what an integration offers; what it inherits is the framework's to document."""
    home = f"penstock.integrations.{module}.{name}"
    options = "".join(f"\n      {key}: false" for key in ("inherited_members", "members"))
    return f"::: {home}\n    options:\n      heading: {home}\n      toc_label: {module}.{name}{options}\n"


def entry(name: str, home: str) -> str:
    """The directive that mkdocstrings replaces by a name's docstring."""
    shown = ""
    if home in ("penstock.masks", "penstock.errors"):
        shown = f"\n      members: [{', '.join(members_of(name))}]"
    elif name in INTERNAL:
        shown = f"\n      filters: ['!^_', '!^({'|'.join(INTERNAL[name].split())})$']"
    return f"::: {home}\n    options:\n      heading: penstock.{name}\n      toc_label: {name}{shown}\n"


def members_of(module: str) -> list[str]:
    """What a public module offers: the names in its `__all__`, or, without one, its classes."""
    path = ROOT / "src/penstock" / module
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def cli_page() -> str:
    """The output of `--help` of the command and of each verb."""
    parts = ["# Command line", "", "As `penstock --help` and `penstock VERB --help` print it.", "", block(help_of())]
    for verb in verbs():
        parts += ["", f"## penstock {verb}", "", block(help_of(verb))]
    return "\n".join(parts) + "\n"


def verbs() -> Iterable[str]:
    """The verbs in the order of the table of contents."""
    return re.findall(r"^  ([a-z]+) {2,}\S", help_of(), re.MULTILINE)


def help_of(*verb: str) -> str:
    """What the command prints, 90 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "90", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "penstock.cli", *verb, "--help"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def block(text: str) -> str:
    """Text to be shown as it is."""
    return f"```text\n{text.rstrip()}\n```"
