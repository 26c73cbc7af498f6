"""Where servers are: a list of addresses, a host name that stands for several, or a file that is kept up to date."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DEFAULT_PORT = 8815


class Address(NamedTuple):
    """One server."""

    host: str
    port: int
    name: str
    """The host as it was given, which the server's certificate must be for."""

    def __str__(self) -> str:
        return join_address(self.host, self.port)


Servers = str | os.PathLike[str] | Sequence[str]
"""One address `host:port`, or several; a host name stands for all its addresses. A path is a file with one per line."""


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `[host]:port` or `host`.

    Raises:
        ValueError: it is none of them.
    """
    host, found, port = text.strip().rpartition(":")
    if not found or (":" in host and not host.startswith("[")):  # no port, or an IPv6 address without brackets
        host, port = text.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535 or "/" in host or any(map(str.isspace, host)):
        raise ValueError(f"{text!r} is not an address; expected host:port, as in 'cpu1:{DEFAULT_PORT}'.")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(servers: Servers) -> list[Address]:
    """Every server there is now, by address; hosts that cannot be resolved are left out.

    Raises:
        ValueError: something is not an address.
        OSError: the file cannot be read.
    """
    found: dict[tuple[str, int], Address] = {}
    for text in _listed(servers):
        name, port = split_address(text)
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        for *_, (host, *_rest) in infos:
            found.setdefault((str(host), port), Address(str(host), port, name))
    return list(found.values())


def _listed(servers: Servers) -> list[str]:
    if isinstance(servers, str) and "/" not in servers:
        return [servers]
    if isinstance(servers, (str, os.PathLike)):
        lines = Path(servers).expanduser().read_text(encoding="utf-8").splitlines()
        return [text for line in lines if (text := line.partition("#")[0].strip())]
    return list(servers)
