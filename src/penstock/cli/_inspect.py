"""Show what is in a dataset: columns, counts, sizes, attributes, lengths, and a few samples; or a batch of a plan."""

from __future__ import annotations

import argparse

from penstock.errors import counted
from penstock.report import print_json

_WIDTH, _SHOWN_LINES = 160, 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET|PLAN.toml", help="the dataset's folder, or a plan file (.toml)")
    parser.add_argument("--samples", type=int, metavar="N", help="how many samples to show (default: 1; as JSON 3)")
    parser.add_argument("--full", action="store_true", help="show everything, not just what fits on a screen")
    parser.add_argument(
        "--decode",
        metavar="TOKENIZER",
        help="show tokens as text, with this tokenizer.json or folder (a note says if it is a different one)",
    )
    parser.add_argument("--step", type=int, default=0, metavar="N", help="which batch of a plan to show (default: 0)")
    parser.add_argument(
        "--sources",
        action="store_true",
        help="also check whether the source files have changed, wherever the dataset says they are: only for datasets "
        "you trust",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if the dataset could be described."""
    from penstock.cli._description import describe, with_texts
    from penstock.cli._description_output import print_description
    from penstock.filesystem import local_path

    num_samples = arguments.samples
    if num_samples is None:
        num_samples = 3 if arguments.json else 1
    path = local_path(arguments.path, "a dataset")
    if path.suffix == ".toml" and path.is_file():
        return _show_batch(arguments)
    description = describe(path, num_samples=num_samples, looks_at_sources=arguments.sources)
    description = with_texts(description, arguments.decode)
    if arguments.json:
        print_json(description.to_json())
    else:
        print_description(description, is_full=arguments.full)
    return 0


def _show_batch(arguments: argparse.Namespace) -> int:
    """A batch of a plan as text, with document boundaries."""
    from penstock.plan import load_plan
    from penstock.report import console
    from penstock.transforms import find_decoder

    plan = load_plan(arguments.path)
    made_with = plan.source.tokenizers if arguments.decode is None else {}
    try:
        text = plan.show(arguments.step, find_decoder(arguments.decode, made_with))
    except IndexError as error:  # there is no such step: a mistake of the user's, not ours
        raise ValueError(str(error)) from None
    if arguments.json:
        print_json({"plan": repr(plan), "fingerprint": plan.fingerprint, "step": arguments.step, "batch": text})
    else:
        shown = text if arguments.full else _on_a_screen(text)
        console().print(f"{plan!r}\n\nstep {arguments.step}: {shown}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _on_a_screen(text: str) -> str:
    """The first lines, each as long as a line of a terminal; what is left out is counted."""
    lines = text.split("\n")
    shown = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} …" for line in lines[:_SHOWN_LINES]]
    if len(lines) > _SHOWN_LINES:
        shown.append(f"… and {counted(len(lines) - _SHOWN_LINES, 'more line')}; --full shows all")
    elif any(len(line) > _WIDTH for line in lines):
        shown.append("Long lines are cut; --full shows all")
    return "\n".join(shown)
