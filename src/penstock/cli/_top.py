"""Show what servers of batches are doing, live: their clients, how much they send, and what is waiting."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from penstock.cli import _values
from penstock.report import console, print_json

if TYPE_CHECKING:
    from rich.console import Group

    from penstock.service import Reading

_SHORTEST = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("servers", nargs="+", metavar="HOST:PORT", help="the servers")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (default: %(default)g)"
    )
    parser.add_argument(
        "--token-file", type=_values.path, metavar="FILE", help="file with the secret that servers require"
    )
    parser.add_argument("--certificate", type=_values.path, metavar="FILE", help="this client's certificate, PEM")
    parser.add_argument("--key", type=_values.path, metavar="FILE", help="its private key, PEM")
    parser.add_argument("--authority", type=_values.path, metavar="FILE", help="authority of the servers' certificates")


def run(arguments: argparse.Namespace) -> int:
    """Once, with --json or without a terminal: 0 if every server answers. Otherwise until Ctrl-C: 0."""
    from penstock.service import read_servers

    security = _values.security_of(arguments)
    readings = read_servers(arguments.servers, security)
    if not readings:
        raise ValueError(
            f"{', '.join(arguments.servers)}: no name service knows an address for that. Check the spelling."
        )
    if arguments.json or not console().is_terminal:
        if arguments.json:
            print_json([{**each.metrics, "server": each.server, "problem": each.problem} for each in readings])
        else:
            console().print(table_of(readings, []))
        return 0 if readings and all(each.problem is None for each in readings) else 1
    from rich.live import Live

    try:
        with Live(table_of(readings, []), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(arguments.interval if arguments.interval > _SHORTEST else _SHORTEST)
                before, readings = readings, read_servers(arguments.servers, security)
                live.update(table_of(readings, before), refresh=True)
    except KeyboardInterrupt:
        return 0


def table_of(readings: list[Reading], before: list[Reading]) -> Group:
    """A row for each server that answers, with rates since the readings before; a line for each of the others."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    earlier = {each.server: each for each in before}
    table = Table(
        Column("server", overflow="fold"), "clients", "batches/s", "MB/s", "shared", "CPUs", "waiting", "queue"
    )
    for each in readings:
        if each.problem is not None:
            continue
        old = earlier.get(each.server)
        cpu = [each.rate(name, old) for name in ("cpu_seconds_total", "worker_cpu_seconds_total")]
        sent = each.rate("sent_bytes_total", old)
        table.add_row(
            each.server,
            f"{each.metrics.get('clients', 0):.0f}",
            _shown(each.rate("batches_total", old)),
            _shown(None if sent is None else sent / 1e6),
            _shown(each.metrics.get("shared_total")),
            _shown(sum(value or 0 for value in cpu) if cpu[0] is not None else None),
            f"{each.metrics.get('waiting', 0):.0f}",
            f"{each.metrics.get('queued', 0):.0f}",
        )
    problems = [Text(f"{each.server}: {each.problem}") for each in readings if each.problem is not None]
    return Group(*([table] if table.row_count else []), *problems)


def _shown(value: float | None) -> str:
    return "…" if value is None else f"{value:,.1f}"
