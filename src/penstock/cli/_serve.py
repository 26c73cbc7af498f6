"""Serve the batches of a plan to training machines, from this machine's processors.

On loopback nothing else is needed. Elsewhere it takes TLS, and a token or client certificates: `penstock certificates`
makes them. SIGTERM lets those who wait have their answer first.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from penstock.report import console, print_json

_DRAIN_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="the plan, as plan.to_toml() writes it")
    parser.add_argument(
        "--bind", default="127.0.0.1:8815", metavar="HOST:PORT", help="where to listen (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes (default: the processors of this job)"
    )
    parser.add_argument(
        "--allow-code", action="append", default=[], metavar="PACKAGE", help="package whose functions the plan may name"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the secret that clients must show")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="this server's certificate, PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its private key, PEM")
    parser.add_argument("--authority", type=Path, metavar="FILE", help="ask clients for certificates of this authority")
    parser.add_argument(
        "--share-mb",
        type=int,
        default=256,
        metavar="MB",
        help="answers kept for others who ask the same (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 after a clean end."""
    from penstock.plan import load_plan
    from penstock.service import Security, serve

    sys.path.insert(0, "")  # functions of the current folder, as `python -m` finds them
    plan = load_plan(arguments.plan, allow_code=arguments.allow_code)
    security = Security(
        token_file=arguments.token_file,
        certificate=arguments.certificate,
        key=arguments.key,
        authority=arguments.authority,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = serve(
        plan, arguments.bind, num_workers=arguments.workers, security=security, window_bytes=arguments.share_mb << 20
    )
    try:
        said = {"address": server.address, "fingerprint": plan.fingerprint, "workers": server.num_workers}
        if arguments.json:
            print_json(said)
            sys.stdout.flush()
        else:
            console().print(f"Serving {plan.fingerprint} on {server.address} with {server.num_workers} workers.")
        ended.wait()
    finally:
        server.close(_DRAIN_SECONDS)
    return 0
