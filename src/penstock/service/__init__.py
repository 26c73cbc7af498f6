"""Batches from other machines: servers that compute a plan, and an engine that asks them.

    trainer                                              CPU machine
    Pipeline ──► RemoteEngine                            Server: HTTP in front of
                   Requests: which server has what       Dispatcher ──► worker processes, `ServedWork`
                   Connection ── GET row, steps, rank ──►   window: what was asked before
                   slot, batch ◄── safetensors body ─────   slot
                   Health: up, suspect, down

Because a batch is a pure function of the plan, a server needs no state, any of them will do, and asking twice is asking
once. A request has no body and names only numbers and the plan's fingerprint; nothing is unpickled on either side.

May import: `errors`, `loader`, `machine`, `plan`, `schema`, `shards`, `workers`. Imported by: `cli`, `pytorch`. Holds
no state.
"""

from penstock.service._addresses import Servers
from penstock.service._certificates import make_certificates
from penstock.service._client import RemoteEngine
from penstock.service._ray import RayServers
from penstock.service._remote import Remote, as_remote, requests_in_flight
from penstock.service._security import Security
from penstock.service._serve import serve
from penstock.service._top import Reading, read_servers

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
