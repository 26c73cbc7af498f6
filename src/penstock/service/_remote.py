"""Where a loader's batches come from when they are computed elsewhere: what `remote=` takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.service._addresses import Servers
from penstock.service._security import Security


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
