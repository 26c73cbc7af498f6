"""Batches from other machines: servers that compute a plan, and an engine that asks them.

    trainer                                              CPU machine
    Pipeline ──► RemoteEngine                            Server: HTTP in front of
                   Requests: which server has what       Dispatcher ──► worker processes, `ServedWork`
                   ServerPool: threads, a Connection ──►   window: what was asked before
                     GET row, steps, rank                  slot
                   slot, batch ◄── safetensors body ────   `Allowance`: what readers may hold
                   ServerState: up, suspect, down

Because a batch is a pure function of the plan, a server needs no state, any of them will do, and asking twice is asking
once. A request has no body and names only numbers and the plan's fingerprint; nothing is unpickled on either side.

May import: `errors`, `filesystem`, `loader`, `machine`, `plan`, `schema`, `shapes`, `shards`, `workers`. Imported by:
`cli`, `pytorch`. Holds no state.
"""

from penstock.service._certificates import make_certificates
from penstock.service._client import RemoteEngine
from penstock.service._serve import RayServers, serve
from penstock.service._servers import Reading, read_servers
from penstock.service._settings import Remote, Security, Servers, as_remote, requests_in_flight

__all__ = [
    "RayServers",
    "Reading",
    "Remote",
    "RemoteEngine",
    "Security",
    "Servers",
    "as_remote",
    "make_certificates",
    "read_servers",
    "requests_in_flight",
    "serve",
]
