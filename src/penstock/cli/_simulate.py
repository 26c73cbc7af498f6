"""`penstock simulate`: what nodes would fetch, before anyone rents them."""

from __future__ import annotations

import argparse
import sys

from penstock.cli import _values
from penstock.cli._flags import Flags, add_allow_code, given
from penstock.report import console, print_json


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.plan import Plan

    parser.add_argument("plan", type=_values.path, metavar="PLAN.toml", help="a plan, as plan.to_toml() writes it")
    options = Flags(parser, Plan.egress)
    options.add("nodes", "ranks")
    options.add("cache_bytes", flag="--cache")
    options.add("bandwidth", type=_values.rate, metavar="RATE", help="what a node receives each second: 25Gb, or 3GB")
    options.add("step_seconds", "epochs")
    add_allow_code(parser)
    parser.add_argument("--html", type=_values.output, metavar="FILE", help="write a report to open in a browser")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Say what the nodes of a run would fetch from an object store: bytes, the cache they need, and how long they wait.

    It follows from the plan's order and the sizes in the manifests; no data is touched. A few nodes are simulated, and
    stand for the others.

    Exit code: 0 if nothing stands in the way, 1 if a cache is too small or nodes would wait, 2 for wrong usage.
    """
    from penstock.filesystem import put_in_place
    from penstock.plan import Plan, load_plan
    from penstock.report import render_html, render_terminal

    sys.path.insert(0, "")  # find functions in the current folder, as `python -m` does
    plan = load_plan(arguments.plan, allow_code=arguments.allow_code)
    found = plan.egress(**given(arguments, Plan.egress))
    page = found.page(arguments.plan.name)
    if arguments.html is not None:
        put_in_place(arguments.html, render_html(page))
    if arguments.json:
        print_json(found.to_json())
    else:
        console().print(render_terminal(page))
    return 0 if found.is_enough else 1
