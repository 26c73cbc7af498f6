"""What the job may use, and what threads, processes, the machine and its accelerators do use.

    usable_cpus()            processors of this job, by affinity and control group
    default_workers()        this rank's share of them
    cpu_shortfall()          whether Slurm's job script lost some of them on the way
    ThreadMeter().read()     the calling thread: CPU time, run-queue delay, page faults
    process_tree(pid)        a process and its descendants: CPU time, memory, reads
    machine_busy_seconds()   everything that runs here
    Accelerators().read()    devices, through NVML
    Sampler(pid)             all of these over time, in columns
    EventWriter(path)        what happened when, in a mapped file that outlives its process

What the kernel does not offer, or a container may not read, is None or NaN, never an error. Nothing here knows
about loaders, and nothing draws.

May import: nothing. Imported by: `doctor`, `loader`, `preparation`, `pytorch`, `service`, `tuning`, `watching`,
`workers`. Holds no state.
"""

from penstock.machine._events import EventKind, EventWriter, no_events, read_events
from penstock.machine._limits import (
    MachineFacts,
    MemoryLimit,
    available_memory,
    cpu_shortfall,
    default_workers,
    describe_machine,
    fullest_memory,
    job_memory,
    ranks_on_node,
    thread_settings,
    usable_cpus,
    use_one_thread_each,
)
from penstock.machine._usage import (
    ProcessUsage,
    Sampler,
    ThreadMeter,
    ThreadUsage,
    UsageHistory,
    process_tree,
    read_process,
)

__all__ = [
    "EventKind",
    "EventWriter",
    "MachineFacts",
    "MemoryLimit",
    "ProcessUsage",
    "Sampler",
    "ThreadMeter",
    "ThreadUsage",
    "UsageHistory",
    "available_memory",
    "cpu_shortfall",
    "default_workers",
    "describe_machine",
    "fullest_memory",
    "job_memory",
    "no_events",
    "process_tree",
    "ranks_on_node",
    "read_events",
    "read_process",
    "thread_settings",
    "usable_cpus",
    "use_one_thread_each",
]
