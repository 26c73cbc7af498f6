"""What servers are doing, from their metrics: two readings of a counter make a rate."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.errors import printable
from penstock.service._addresses import Address, Servers, resolve
from penstock.service._fetch import Connection, Refused
from penstock.service._security import Security

_SECONDS = 5.0
_PREFIX = "penstock_"


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics of one server at one time, without their prefix; or why there are none."""

    server: str
    at: float
    metrics: dict[str, float]
    problem: str | None = None

    def rate(self, name: str, before: Reading | None) -> float | None:
        """How much a counter grew per second since an earlier reading; None if that is unknown."""
        if before is None or self.at <= before.at or name not in self.metrics or name not in before.metrics:
            return None
        gained = self.metrics[name] - before.metrics[name]
        return gained / (self.at - before.at) if gained >= 0 else None  # it was started again


def read_servers(servers: Servers, security: Security) -> list[Reading]:
    """A reading of every server there is now."""
    found = resolve(servers)
    with ThreadPoolExecutor(max(1, len(found))) as readers:
        return list(readers.map(lambda address: _read(address, security), found))


def _read(address: Address, security: Security) -> Reading:
    connection = Connection(address, tls=security.client_context(), token=security.token, seconds=_SECONDS)
    try:
        metrics = parse_metrics(connection.get_text("/metrics"))
        return Reading(str(address), time.monotonic(), metrics)
    except (OSError, Refused, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Reading(str(address), time.monotonic(), {}, printable(problem))
    finally:
        connection.close()


def parse_metrics(page: str) -> dict[str, float]:
    """The values in a page for Prometheus, of metrics without labels.

    Raises:
        ValueError: it has other lines, or values that are not numbers.
    """
    lines = (line.split() for line in page.splitlines() if line.startswith(_PREFIX))
    found = {name.removeprefix(_PREFIX): float(value) for name, value in lines}
    if not all(map(math.isfinite, found.values())):
        raise ValueError("Some metrics are not numbers.")
    return found
