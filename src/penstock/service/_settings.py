"""What `remote=` and `security=` take: where servers are, how long to wait for them, and who may ask.

Servers are a list of addresses, a host name that stands for several, or a file that is kept up to date.

On loopback no secret is needed. Anywhere else a server needs a certificate, and either a token or an authority that
signs its clients' certificates: without them it refuses to start. TLS is version 1.3. A token or key that every user of
the machine can change is refused on both sides.
"""

import functools
import hmac
import ipaddress
import logging
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.filesystem import read_small

DEFAULT_PORT = 8815
Servers = str | os.PathLike[str] | Sequence[str]
"""One address `host:port`, or several; a host name stands for all its addresses. A path is a file with one per line."""
logger = logging.getLogger(__name__)
_MAX_SERVERS, _MAX_LIST_BYTES = 1024, 1 << 20
_MIN_TOKEN_CHARACTERS, _MAX_TOKEN_CHARACTERS = 16, 4096


class Address(NamedTuple):
    """One server."""

    host: str
    port: int
    name: str
    """The host as it was given, which the server's certificate must be for."""

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `[host]:port` or `host`.

    Raises:
        ValueError: it is something else.
    """
    host, found, port = text.strip().rpartition(":")
    if not found or (":" in host and not host.startswith("[")):  # no port, or an IPv6 address without brackets
        host, port = text.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not host or not is_port or not host.isprintable() or any(each in " /@" for each in host):
        raise _not_an_address(text)
    return host, int(port)


def _not_an_address(text: str) -> ValueError:
    """What is before an @ may be a password."""
    before, found, address = text.rpartition("@")
    shown = f"…@{address}" if found else before + address
    return ValueError(f"{shown[:100]!r} is not an address; expected host:port, as in 'cpu1:{DEFAULT_PORT}'.")


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(servers: Servers) -> list[Address]:
    """Every server there is now, by address; hosts that cannot be resolved are left out.

    Raises:
        TypeError: an address is not a str.
        ValueError: something is not an address, the file is not a list of them, or there are too many.
        OSError: the file cannot be read.
    """
    found: dict[tuple[str, int], Address] = {}
    for text in _listed(servers):
        name, port = split_address(text)
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        except UnicodeError:  # a label is empty, longer than 63 characters, or has such that no name has
            raise _not_an_address(text) from None
        for *_, (host, *_rest) in infos:
            found.setdefault((str(host), port), Address(str(host), port, name))
        if len(found) > _MAX_SERVERS:
            raise ValueError(
                f"{name} and those before it are over {_MAX_SERVERS:,} servers; each is asked by a thread."
            )
    return list(found.values())


def _listed(servers: Servers) -> list[str]:
    if isinstance(servers, str) and ("/" not in servers or "://" in servers):
        return [servers]
    if isinstance(servers, (str, os.PathLike)):
        lines = read_small(Path(servers).expanduser(), _MAX_LIST_BYTES).decode().splitlines()
        return [text for line in lines if (text := line.partition("#")[0].strip())]
    if not all(isinstance(each, str) for each in servers):
        raise TypeError(
            f"{next(each for each in servers if not isinstance(each, str))!r} is not an address; expected a str."
        )
    return list(servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """How one side of a connection proves itself to the other, and what it demands of it.

    On loopback nothing is needed. Anywhere else a server requires TLS (`certificate`, `key`), and either a token
    or, with `authority`, a certificate of each client.
    """

    token_file: str | os.PathLike[str] | None = None
    """A file with a secret that servers and clients share, of at least 16 characters."""
    certificate: str | os.PathLike[str] | None = None
    """This side's certificate, PEM."""
    key: str | os.PathLike[str] | None = None
    """The certificate's private key, PEM."""
    authority: str | os.PathLike[str] | None = None
    """Certificate of the authority that the other side's must be signed by, PEM."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("Give both certificate and key, or neither.")

    @property
    def token(self) -> str | None:
        """The secret in the token file.

        Raises:
            ValueError: it is too short to be one, cannot be sent, or every user can change it.
        """
        if self.token_file is None:
            return None
        with open(Path(self.token_file).expanduser(), encoding="utf-8") as file:
            _check_secret(self.token_file, os.fstat(file.fileno()).st_mode)  # of the very file that is read
            token = file.read(_MAX_TOKEN_CHARACTERS).strip()
        if len(token) < _MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"{self.token_file}: a token has at least {_MIN_TOKEN_CHARACTERS} printable ASCII characters. "
                "`openssl rand -hex 32` makes one."
            )
        return token

    def server_context(self) -> ssl.SSLContext | None:
        """A server's TLS context, or None if it has no certificate."""
        if self.certificate is None or self.key is None:
            return None
        _check_secret(self.key, _mode(self.key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        if self.authority is not None:
            context.load_verify_locations(self.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """A client's TLS context, or None if it has no authority."""
        if self.authority is None:
            if self.certificate is not None:
                raise ValueError("A client with a certificate also needs authority=, to verify the server with.")
            return None
        context = ssl.create_default_context(cafile=os.fspath(self.authority))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.certificate is not None and self.key is not None:
            _check_secret(self.key, _mode(self.key))
            context.load_cert_chain(self.certificate, self.key)
        return context

    def check_server(self, host: str) -> None:
        """Refuse to listen where strangers can ask.

        Raises:
            ValueError: the address is not loopback, and there is no TLS, or neither a token nor client certificates.
        """
        if is_loopback(host):
            return
        if self.certificate is None:
            raise ValueError(
                f"{host} can be reached from other machines: a server there needs TLS (certificate=, key=; "
                "--certificate, --key) and a token (token_file=, --token-file) or the authority of client certificates "
                "(authority=, --authority). "
                "`penstock certificates FOLDER HOST…` makes them."
            )
        if self.token_file is None and self.authority is None:
            raise ValueError(
                f"{host} can be reached from other machines: a server there needs token_file= (--token-file), "
                "or authority= (--authority) to ask clients for certificates."
            )


def _mode(path: str | os.PathLike[str]) -> int:
    return os.stat(Path(path).expanduser()).st_mode


def _check_secret(path: str | os.PathLike[str], mode: int) -> None:
    """Refuse a secret that every user of this machine can change, and warn about one that they can read or replace.

    Only a warning, because containers mount their secrets and folders like that.

    Raises:
        ValueError: every user can write to the file.
    """
    if mode & stat.S_IWOTH:
        raise ValueError(f"{path}: every user of this machine can change this secret. chmod 600 {path}")
    if mode & stat.S_IROTH:
        _warn(f"{path}: every user of this machine can read this secret. chmod 600 {path}")
    folder = Path(path).expanduser().resolve().parent
    for each in (folder, *folder.parents):
        if _mode(each) & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            _warn(f"{path}: every user of this machine can replace this secret. chmod o-w {each}")


@functools.cache
def _warn(warning: str) -> None:
    """Warn once of each: secrets may be checked every second."""
    logger.warning("%s", warning)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str | None) -> bool:
    """Whether a Host header has no name but `localhost`, so that no name service decided who is asked."""
    try:
        name = split_address(host or "localhost")[0]
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_token(authorization: str | None, token: str) -> bool:
    """Whether an Authorization header shows the token, compared in constant time."""
    shown = (authorization or "").encode("utf-8", "replace")
    return hmac.compare_digest(shown, f"Bearer {token}".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where batches come from, and how long to wait for them."""

    servers: Servers
    """Addresses; a name or a file that stands for several is looked up again and again, so servers may come and go."""
    timeout_seconds: float = 30.0
    """How long to wait while no server answers; then that is an error. One batch must take less."""
    security: Security = field(default_factory=Security)
    """What is needed beyond loopback: a token, and the authority of the servers' certificates."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds!r}; expected more than 0.")


def requests_in_flight(num_workers: int) -> int:
    """How many requests keep this many workers of servers busy: two each, and two in transit."""
    return 2 * num_workers + 2


def as_remote(remote: Remote | Servers | None) -> Remote | None:
    """What `remote=` of a loader means: settings as they are, or addresses with default settings."""
    return remote if remote is None or isinstance(remote, Remote) else Remote(servers=remote)
