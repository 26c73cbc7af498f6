"""Certificates for a small cluster: an authority of its own, one certificate for servers and one for clients.

For clusters that have no authority. The authority's key is used once and never written: another server needs a new set,
and a lost key cannot sign anything.
"""

import contextlib
import datetime
import functools
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DatasetExists, MissingExtra

_CLOCK_SKEW = datetime.timedelta(hours=1)
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_LONGEST_NAME = 64
"""Of a certificate's subject; clients look at the list of hosts."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where everything was written."""

    authority: Path
    server: tuple[Path, Path]
    """(certificate, key)"""
    client: tuple[Path, Path]
    """(certificate, key)"""


def make_certificates(folder: str | os.PathLike[str], hosts: Sequence[str], *, days: int = 365) -> CertificateFiles:
    """Make an authority, and certificates for servers of these names or addresses and for clients.

    Raises:
        DatasetExists: certificates are there already.
        ValueError: there is no host, one is not a name or an address, or the days are not positive.
    """
    if not hosts or days < 1:
        raise ValueError("Certificates need at least one host and one day.")
    for host in hosts:
        _check_host(host)
    where = Path(folder).expanduser()
    where.mkdir(parents=True, exist_ok=True)
    files = CertificateFiles(
        where / "authority.pem",
        (where / "server.pem", where / "server.key"),
        (where / "client.pem", where / "client.key"),
    )
    there = [path for path in (files.authority, *files.server, *files.client) if path.exists()]
    if there:
        raise DatasetExists(f"{there[0]} already exists. Remove it, or choose another folder.")
    authority = _Authority(days)
    _write(files.authority, authority.certificate_pem)
    for (certificate, key), names, is_server in ((files.server, hosts, True), (files.client, ["client"], False)):
        certificate_pem, key_pem = authority.issue(names, is_server=is_server)
        _write(key, key_pem, is_secret=True)
        _write(certificate, certificate_pem)
    return files


def _check_host(host: str) -> None:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not _HOST_NAME.fullmatch(host):
        without_port = f", as in {host.rpartition(':')[0]}" if host.rpartition(":")[2].isdigit() else ""
        raise ValueError(f"{host!r} is not a host name or an IP address; leave out the port{without_port}.")


class _Authority:
    """Signs certificates; its key stays in memory."""

    def __init__(self, days: int) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise MissingExtra("Certificates need cryptography: pip install 'penstock-data[service]'") from error
        self._x509: Any = x509
        self._forms, self._sha256, self._days = serialization, hashes.SHA256(), days
        self._make_key: Callable[[], Any] = functools.partial(ec.generate_private_key, ec.SECP256R1())
        self._key, self._name = self._make_key(), self._named("Penstock cluster authority")
        constraints, usage = x509.BasicConstraints(ca=True, path_length=0), self._usage("key_cert_sign", "crl_sign")
        self.certificate_pem = self._sign(self._name, self._key, [(constraints, True), (usage, True)])
        """Its own certificate, which verifies the others."""

    def issue(self, hosts: Sequence[str], *, is_server: bool) -> tuple[bytes, bytes]:
        """(certificate, key) for these hosts."""
        x509, forms, key = self._x509, self._forms, self._make_key()
        purposes = x509.ExtendedKeyUsageOID
        extensions = [
            (x509.SubjectAlternativeName([self._general_name(host) for host in hosts]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([purposes.SERVER_AUTH if is_server else purposes.CLIENT_AUTH]), True),
            (self._usage("digital_signature"), True),
        ]
        key_pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
        return self._sign(self._named(hosts[0]), key, extensions), key_pem

    def _sign(self, subject: Any, key: Any, extensions: Sequence[tuple[Any, bool]]) -> bytes:
        """A signed certificate, PEM; each extension says whether those who do not know it must refuse."""
        x509, now = self._x509, datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=self._days))
        )
        keys = (
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        )
        for extension, is_critical in (*keys, *extensions):
            builder = builder.add_extension(extension, critical=is_critical)
        pem: bytes = builder.sign(self._key, self._sha256).public_bytes(self._forms.Encoding.PEM)
        return pem

    def _usage(self, *uses: str) -> Any:
        names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        every = (*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
        return self._x509.KeyUsage(**{name: name in uses for name in every})

    def _named(self, name: str) -> Any:
        x509 = self._x509
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:_LONGEST_NAME])])

    def _general_name(self, host: str) -> Any:
        try:
            return self._x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return self._x509.DNSName(host)


def _write(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a file that must be new; only its owner can read a secret, from the moment the file exists."""
    mode = 0o600 if is_secret else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
