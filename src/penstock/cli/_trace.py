"""`penstock trace`: the documents of a batch, and where they came from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from penstock.cli._flags import add_allow_code
from penstock.report import console, print_json

if TYPE_CHECKING:
    from penstock.plan import DocumentTrace, Plan
    from penstock.transforms import Decoder

_SHOWN_DOCUMENTS, _SHOWN_TOKENS, _SHOWN_TEXT = 20, 64, 60


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="DATASET_OR_PLAN", help="a plan file (.toml), or a dataset's folder")
    where = parser.add_argument_group("which batch")
    where.add_argument("--step", type=int, required=True, metavar="N", help="step of the epoch, from 0")
    where.add_argument("--epoch", type=int, default=0, metavar="E", help="epoch, from 0 (default: %(default)s)")
    where.add_argument("--rank", type=int, default=0, metavar="R", help="one rank's rows (default: those of all ranks)")
    where.add_argument("--world-size", type=int, default=1, metavar="W", help="how many ranks share the batch")
    where.add_argument("--row", type=int, metavar="N", help="one row of the batch (default: all)")
    stages = parser.add_argument_group("stages, for a dataset")
    stages.add_argument("--seed", type=int, metavar="S", help="shuffle with this seed")
    stages.add_argument("--pack", type=int, metavar="LENGTH", help="pack into rows of this many tokens")
    stages.add_argument("--window", type=int, metavar="LENGTH", help="cut into windows of this many tokens")
    stages.add_argument("--batch", type=int, metavar="ROWS", help="rows of a batch, over all ranks")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--decode", metavar="TOKENIZER", help="tokenizer.json or folder: show what each document says")
    shown.add_argument("--full", action="store_true", help=f"all documents, not the first {_SHOWN_DOCUMENTS}")
    add_allow_code(shown)


def run_trace(arguments: argparse.Namespace) -> int:
    """Show which documents are in a batch: where each lies, which file and row it came from, and what it says.

    For "my loss jumped at step 4,711". Give the plan that was trained on (`plan.to_toml()`), or a dataset and its
    stages.
    """
    from penstock.transforms import find_decoder

    plan = _find_plan(arguments)
    at = {name: getattr(arguments, name) for name in ("step", "epoch", "rank", "world_size")}
    try:
        traces = [each for each in plan.documents(**at) if arguments.row in (None, each.row)]
    except IndexError as error:  # there is no such step: a wrong argument, not a fault
        raise ValueError(str(error)) from None
    decoder = find_decoder(arguments.decode, plan.source.tokenizers)
    shown = traces if arguments.full or arguments.json else traces[:_SHOWN_DOCUMENTS]
    texts = _texts(plan, at, shown, decoder)
    if arguments.json:
        print_json([_as_json(trace, text) for trace, text in zip(shown, texts, strict=True)])
    else:
        _print(arguments, plan, shown, texts, num_left=len(traces) - len(shown))
    return 0


def _find_plan(arguments: argparse.Namespace) -> Plan:
    """The named plan, without its maps: they change the contents of rows, not which documents are in them."""
    from penstock.filesystem import local_path
    from penstock.plan import Plan, load_plan, open_dataset

    given = (arguments.seed, arguments.pack, arguments.window, arguments.batch)
    if local_path(arguments.path, "a dataset or a plan file").is_file() and str(arguments.path).endswith(".toml"):
        if any(value is not None for value in given):
            raise ValueError(
                f"{arguments.path} is a plan, with its own stages: --seed, --pack, --window and --batch are for "
                "datasets."
            )
        plan = load_plan(arguments.path, allow_code=arguments.allow_code)
        return Plan(plan.source, tuple(stage for stage in plan.stages if stage.verb != "map"))
    plan = open_dataset(arguments.path).as_plan()
    if arguments.batch is None:
        raise ValueError(
            f"{arguments.path} is a dataset: say what a batch is, as in --seed 7 --pack 4096 --batch 32, or give a "
            "plan file."
        )
    if arguments.seed is not None:
        plan = plan.shuffle(arguments.seed)
    if arguments.pack is not None:
        plan = plan.pack(arguments.pack)
    if arguments.window is not None:
        plan = plan.window(arguments.window)
    return plan.batch(arguments.batch)


def _texts(plan: Plan, at: dict[str, int], traces: list[DocumentTrace], decoder: Decoder | None) -> list[str | None]:
    """What each document says, if its tokens are in the batch and the tokenizer is known."""
    if decoder is None or plan.labels is None:
        return [None] * len(traces)
    tokens = plan.read(at["step"], at["epoch"], at["rank"], at["world_size"])["input_ids"]
    return [
        decoder(tokens[trace.row, trace.column : trace.column + min(trace.size, _SHOWN_TOKENS)]) for trace in traces
    ]


def _as_json(trace: DocumentTrace, text: str | None) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(trace), **({} if text is None else {"text": text})}


def _print(
    arguments: argparse.Namespace, plan: Plan, traces: list[DocumentTrace], texts: list[str | None], *, num_left: int
) -> None:
    from penstock.errors import counted

    out = console()
    is_tokens = plan.labels is not None or any(trace.size > 1 for trace in traces)
    noun = "document" if is_tokens or plan.source.tokenizers else "sample"
    rank = f", rank {arguments.rank} of {arguments.world_size}" if arguments.world_size > 1 else ""
    out.print(f"Step {arguments.step} of epoch {arguments.epoch}{rank}: {counted(len(traces) + num_left, noun)}")
    row = -1
    for trace, text in zip(traces, texts, strict=True):
        if trace.row != row:
            row = trace.row
            out.print(f"\nrow {row}", style="bold")
        source = f"{trace.source}: " if trace.source else ""
        where = f"{f'{trace.column}:{trace.column + trace.size}':<12} " if is_tokens else ""
        begin = f" from token {trace.start:,}" if is_tokens else ""
        out.print(f"  {where}{source}{noun} {trace.document:,}{begin}   {trace.origin}".rstrip())
        if text is not None:
            out.print(f"  {'':<12} {' '.join(text.split())[:_SHOWN_TEXT]!r}")
    if num_left:
        out.print(f"\n… and {counted(num_left, noun)} more; --full shows all, --row N one row.")
    if plan.labels is not None and plan.source.tokenizers and not any(text is not None for text in texts):
        names = ", ".join(plan.source.tokenizers.values())
        out.print(f"\n--decode TOKENIZER shows the text (the tokens were made with {names}).")
