"""What threads, processes, the machine and its accelerators use: clocks and counters as small typed data.

    ThreadMeter().read()     the calling thread: CPU time, run-queue delay, page faults
    process_tree(pid)        a process and its descendants: CPU time, memory, reads
    machine_busy_seconds()   everything that runs here
    Accelerators().read()    devices, through NVML
    Sampler(pid)             all of these over time, in columns
    EventWriter(path)        what happened when, in a mapped file that outlives its process

What the kernel does not offer, or a container may not read, is None or NaN, never an error. Nothing here knows
about loaders, and nothing draws.

May import: `cgroups`, `workers`. Imported by: `diagnosis`, `placement`, `pytorch`, `trials`, `watching`. Holds no
state.
"""

from penstock.metrics._events import EventKind, EventWriter, no_events, read_events
from penstock.metrics._machine import MachineFacts, available_memory, describe_machine, job_memory
from penstock.metrics._processes import ProcessUsage, process_tree, read_process
from penstock.metrics._sampler import Sampler, UsageHistory
from penstock.metrics._threads import ThreadMeter, ThreadUsage

__all__ = [
    "EventKind",
    "EventWriter",
    "MachineFacts",
    "ProcessUsage",
    "Sampler",
    "ThreadMeter",
    "ThreadUsage",
    "UsageHistory",
    "available_memory",
    "describe_machine",
    "job_memory",
    "no_events",
    "process_tree",
    "read_events",
    "read_process",
]
