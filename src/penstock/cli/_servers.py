"""`penstock serve`, `top` and `certificates`: servers of a plan's batches on other machines."""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import _values
from penstock.cli._flags import Flags, add_allow_code, add_security, given
from penstock.errors import counted
from penstock.report import console, print_json

if TYPE_CHECKING:
    from rich.console import Group

    from penstock.plan import Plan
    from penstock.service import Reading, Security

_DRAIN_SECONDS = 10.0
_MAX_FILES = 8192
_SHORTEST_INTERVAL = 0.1


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from penstock.service import RayServers, serve

    parser.add_argument("plan", type=_values.path, metavar="PLAN.toml", help="the plan, as plan.to_toml() writes it")
    options = Flags(parser, serve)
    options.add("bind", metavar="HOST:PORT")
    options.add("num_workers", flag="--workers")
    options.add("window_bytes", flag="--share-mb", type=_values.mebibytes, metavar="MB")
    add_allow_code(parser)
    add_security(parser)
    cluster = Flags(parser.add_argument_group("on a Ray cluster"), RayServers)
    cluster.add("count", flag="--ray", metavar="N", default=None)
    cluster.add("cluster", flag="--address", metavar="HOST:PORT")
    cluster.add("file", flag="--servers-file", default=Path("servers.txt"))


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve the batches of a plan to training machines, computed by this machine's processors.

    On loopback nothing else is needed. Elsewhere it requires TLS, and a token or client certificates: `penstock
    certificates` makes them. After SIGTERM, requests that are waiting are answered first.
    """
    from penstock.plan import load_plan
    from penstock.service import Security

    if arguments.allow_code:
        sys.path.insert(0, os.getcwd())  # like `python -m`; otherwise nothing in a stranger's folder is imported
    plan = load_plan(arguments.plan, allow_code=arguments.allow_code)
    security = Security(**given(arguments, Security))
    ended = threading.Event()
    previous = _end_on_signals(ended)
    try:
        return (_serve_here if arguments.count is None else _serve_on_ray)(arguments, plan, security, ended)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_on_signals(ended: threading.Event) -> dict[int, Any]:
    """Handlers for both, which may come any number of times; what was there before is returned."""
    return {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}


def _allow_many_connections() -> None:
    """Allow as many open files as an ordinary user may have: strangers may hold a connection for some seconds each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _serve_here(arguments: argparse.Namespace, plan: Plan, security: Security, ended: threading.Event) -> int:
    from penstock.service import serve

    _allow_many_connections()
    server = serve(**given(arguments, serve) | {"plan": plan}, security=security)
    try:
        said = {"address": server.address, "fingerprint": plan.fingerprint, "workers": server.num_workers}
        workers = counted(server.num_workers, "worker")
        _say(arguments, said, f"Serving {plan.fingerprint} on {server.address} with {workers}.")
        ended.wait()
    finally:
        server.close(_DRAIN_SECONDS)
    return 0


def _serve_on_ray(arguments: argparse.Namespace, plan: Plan, security: Security, ended: threading.Event) -> int:
    from penstock.service import RayServers

    with RayServers(**given(arguments, RayServers) | {"plan": plan}, security=security) as servers:
        _end_on_signals(ended)  # Ray has put its own in their place, which exits with an error
        said = {"servers_file": str(arguments.file), "fingerprint": plan.fingerprint, "servers": arguments.count}
        running = f"{counted(arguments.count, 'server')} with {counted(servers.num_workers, 'worker')} each"
        _say(arguments, said, f"Serving {plan.fingerprint} from {running}; {arguments.file} says where.")
        servers.watch(ended.is_set)
    return 0


def _say(arguments: argparse.Namespace, as_data: dict[str, Any], in_words: str) -> None:
    if arguments.json:
        print_json(as_data)
        sys.stdout.flush()
    else:
        console().print(in_words)


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("servers", nargs="+", metavar="HOST:PORT", help="the servers")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (default: %(default)g)"
    )
    add_security(parser)


def run_top(arguments: argparse.Namespace) -> int:
    """Show what servers of batches are doing, live: their clients, how much they send, and what is waiting.

    With --json, or without a terminal, it looks once, and ends with 1 if a server does not answer.
    """
    from penstock.service import Security, read_servers

    security = Security(**given(arguments, Security))
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
                time.sleep(arguments.interval if arguments.interval > _SHORTEST_INTERVAL else _SHORTEST_INTERVAL)
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


def add_certificates_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("folder", type=_values.path, metavar="FOLDER", help="where to write them")
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="names and addresses that clients know the servers by")
    parser.add_argument("--days", type=int, default=365, help="how many days they are valid (default: %(default)s)")


def run_certificates(arguments: argparse.Namespace) -> int:
    """Make certificates for a small cluster: an authority, one certificate for servers, one for clients."""
    from penstock.service import make_certificates

    files = make_certificates(arguments.folder, arguments.hosts, days=arguments.days)
    if arguments.json:
        print_json(
            {
                "authority": str(files.authority),
                "server": list(map(str, files.server)),
                "client": list(map(str, files.client)),
            }
        )
        return 0
    (certificate, key), client = files.server, files.client
    options = shlex.join(["--certificate", str(certificate), "--key", str(key), "--authority", str(files.authority)])
    paths = {"certificate": client[0], "key": client[1], "authority": files.authority}
    security = ", ".join(f"{name}={str(path)!r}" for name, path in paths.items())
    console().print(
        f"penstock serve PLAN.toml --bind {arguments.hosts[0]}:8815 {options}\n\npenstock.Security({security})",
        soft_wrap=True,
    )
    return 0
