"""Make certificates for a small cluster: an authority, one certificate for servers, one for clients."""

from __future__ import annotations

import argparse
import shlex

from penstock.cli import _values
from penstock.report import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("folder", type=_values.path, metavar="FOLDER", help="where to write them")
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="names and addresses that clients know the servers by")
    parser.add_argument("--days", type=int, default=365, help="how many days they are valid (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """0 once they are written."""
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
