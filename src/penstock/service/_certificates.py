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
        raise ValueError(f"{host!r} is not a name or address of a host; give it without a port{without_port}.")


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
        self._serialization, self._sha256 = serialization, hashes.SHA256()
        self._days = days
        self._make_key: Callable[[], Any] = functools.partial(ec.generate_private_key, ec.SECP256R1())
        self._key = self._make_key()
        self._name = self._named("Penstock cluster authority")
        usage = self._key_usage(key_cert_sign=True, crl_sign=True)
        constraints = self._x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self._certificate = self._sign(builder.add_extension(usage, critical=True))

    @property
    def certificate_pem(self) -> bytes:
        """Its own certificate, which verifies the others."""
        return self._pem(self._certificate)

    def issue(self, hosts: Sequence[str], *, is_server: bool) -> tuple[bytes, bytes]:
        """(certificate, key) for these hosts."""
        x509, forms, key = self._x509, self._serialization, self._make_key()
        purposes = x509.ExtendedKeyUsageOID
        purpose = purposes.SERVER_AUTH if is_server else purposes.CLIENT_AUTH
        builder = (
            self._builder(self._named(hosts[0]), key)
            .add_extension(x509.SubjectAlternativeName([self._general_name(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
            .add_extension(self._key_usage(digital_signature=True), critical=True)
        )
        key_pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
        return self._pem(self._sign(builder)), key_pem

    def _builder(self, subject: Any, key: Any) -> Any:
        x509, now = self._x509, datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=self._days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _sign(self, builder: Any) -> Any:
        return builder.sign(self._key, self._sha256)

    def _key_usage(self, **uses: bool) -> Any:
        names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        every = (*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
        return self._x509.KeyUsage(**{name: uses.get(name, False) for name in every})

    def _named(self, name: str) -> Any:
        x509 = self._x509
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:_LONGEST_NAME])])

    def _general_name(self, host: str) -> Any:
        try:
            return self._x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return self._x509.DNSName(host)

    def _pem(self, certificate: Any) -> bytes:
        pem: bytes = certificate.public_bytes(self._serialization.Encoding.PEM)
        return pem


def _write(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a file that must be new; only its owner can read a secret, from the moment the file exists."""
    mode = 0o600 if is_secret else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
