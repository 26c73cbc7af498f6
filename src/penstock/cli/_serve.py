"""Serve the batches of a plan to training machines, computed by this machine's processors.

On loopback nothing else is needed. Elsewhere it requires TLS, and a token or client certificates: `penstock
certificates` makes them. After SIGTERM, requests that are waiting are answered first.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import _values
from penstock.errors import counted
from penstock.report import console, print_json

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.service import Security

_DRAIN_SECONDS = 10.0
_MAX_FILES = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("plan", type=_values.path, metavar="PLAN.toml", help="the plan, as plan.to_toml() writes it")
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help="where to listen (default: 127.0.0.1:8815; with --ray 127.0.0.1 and a free port)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes (default: the processors of this job)"
    )
    _values.add_allow_code(parser)
    parser.add_argument(
        "--token-file", type=_values.path, metavar="FILE", help="file with the secret that clients must show"
    )
    parser.add_argument("--certificate", type=_values.path, metavar="FILE", help="this server's certificate, PEM")
    parser.add_argument("--key", type=_values.path, metavar="FILE", help="its private key, PEM")
    parser.add_argument(
        "--authority", type=_values.path, metavar="FILE", help="require client certificates from this authority"
    )
    parser.add_argument(
        "--share-mb",
        type=int,
        default=256,
        metavar="MB",
        help="answers kept for clients with the same request (default: %(default)s)",
    )
    cluster = parser.add_argument_group("on a Ray cluster")
    cluster.add_argument("--ray", type=int, metavar="N", help="run N servers on the cluster, and restart lost ones")
    cluster.add_argument(
        "--address", metavar="HOST:PORT", help="the cluster (default: $RAY_ADDRESS, or a new one here)"
    )
    cluster.add_argument(
        "--servers-file",
        type=_values.path,
        default=Path("servers.txt"),
        metavar="FILE",
        help="kept up to date for clients, as in DataLoader(plan, remote=Path(FILE)) (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 after a clean shutdown."""
    from penstock.plan import load_plan

    if arguments.allow_code:
        sys.path.insert(0, os.getcwd())  # like `python -m`; otherwise nothing in a stranger's folder is imported
    plan = load_plan(arguments.plan, allow_code=arguments.allow_code)
    security = _values.security_of(arguments)
    ended = threading.Event()
    previous = _end_on_signals(ended)
    try:
        return (_serve_here if arguments.ray is None else _serve_on_ray)(arguments, plan, security, ended)
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
    server = serve(
        plan,
        arguments.bind or "127.0.0.1:8815",
        num_workers=arguments.workers,
        security=security,
        window_bytes=arguments.share_mb << 20,
    )
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

    with RayServers(
        plan,
        arguments.servers_file,
        arguments.ray,
        bind=arguments.bind or "127.0.0.1:0",
        num_workers=arguments.workers,
        security=security,
        window_bytes=arguments.share_mb << 20,
        cluster=arguments.address,
    ) as servers:
        _end_on_signals(ended)  # Ray has put its own in their place, which exits with an error
        said = {"servers_file": str(arguments.servers_file), "fingerprint": plan.fingerprint, "servers": arguments.ray}
        place = f"{counted(arguments.ray, 'server')} with {counted(servers.num_workers, 'worker')} each"
        place += f"; {arguments.servers_file} says where."
        _say(arguments, said, f"Serving {plan.fingerprint} from {place}")
        servers.watch(ended.is_set)
    return 0


def _say(arguments: argparse.Namespace, as_data: dict[str, Any], in_words: str) -> None:
    if arguments.json:
        print_json(as_data)
        sys.stdout.flush()
    else:
        console().print(in_words)
