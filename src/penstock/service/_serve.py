"""`penstock.serve`: starts a server, or says which package is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import MissingExtra
from penstock.plan import Plan
from penstock.service._security import Security
from penstock.workers import StartMethod

if TYPE_CHECKING:
    from penstock.service._server import Server


def serve(
    plan: Plan,
    bind: str = "127.0.0.1:8815",
    *,
    num_workers: int | None = None,
    start_method: StartMethod = "forkserver",
    security: Security | None = None,
    window_bytes: int = 256 << 20,
) -> Server:
    """Serve a plan's batches from this machine, until the returned server is closed.

    Args:
        plan: What to serve; it ends with `batch()`.
        bind: Host and port to listen on; port 0 takes a free one.
        num_workers: Worker processes; by default as many as the processors this job may use.
        start_method: How worker processes start.
        security: TLS and tokens, without which a server listens on loopback only.
        window_bytes: How many bytes of sent answers are kept for other ranks and jobs that ask for the same.

    Raises:
        ValueError: the address can be reached from other machines, and nothing keeps strangers out.

    >>> import numpy as np, penstock
    >>> plan = penstock.from_arrays({"x": np.arange(6)}).batch(2)
    >>> with serve(plan, "127.0.0.1:0", num_workers=1) as server:
    ...     loader = penstock.DataLoader(plan, remote=[server.address])
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1], [2, 3], [4, 5]]
    """
    try:
        from penstock.service._server import Server
    except ImportError as error:
        raise MissingExtra(f"penstock.serve needs {error.name}: pip install 'penstock[service]'") from error
    return Server(
        plan, bind, num_workers=num_workers, start_method=start_method, security=security, window_bytes=window_bytes
    )
