"""Worker processes: how they start, what they are sent, and how they end.

    owner                                            worker process
    -----                                            --------------
    Crew(program, start_method)
      .start()    fork server: asks it for a fork -> _fork_servers.py ┐      shared by all crews
                  spawn: an interpreter -----------> _entry.py        ├─> _worker.run_program
                  fork: this process, as it is ------------------------┘
                                                       1. holds the life-line; the program guards it
                  SentProgram, first message ----->    2. loads the program; imports the user's script only
                                                          if the program contains a function from it
      worker.send(…)  <------ channel ------------->   3. program.run(channel): messages, and descriptors
      .wait()     who has sent something, or died; a long silence -> Patience, describe_silence
                  <------ SentError ----------------   an error: raised again in the owner, its traceback the cause
      .remove_dead()  <-- end of file --------------   a death: exit code -> describe_death
      .close()    cuts the life-line --------------->  SIGKILL by the kernel, whatever it is doing; likewise
                                                       when the owner exits or is killed

`Cluster` connects to a Ray cluster.

What the messages mean is the program's business: nothing here knows about plans, batches, tasks or shards.

May import: `errors`, `machine`. Imported by: `loader`, `preparation`, `pytorch`, `remote`, `service`. Holds state: the
running fork servers; the crews and programs of this process, weakly, for the hook that lets go of them in forked
children.
"""

from penstock.workers._channel import Channel, abandon_in_forks, create_shared_memory, grow_shared_memory
from penstock.workers._cluster import Cluster
from penstock.workers._crew import Crew
from penstock.workers._entry import guard_life_line
from penstock.workers._failures import (
    Patience,
    SentError,
    describe_death,
    describe_ending,
    describe_silence,
    is_crash,
    may_lack_memory,
)
from penstock.workers._fork_servers import ServerLease, WarmUp, lease_early
from penstock.workers._program import Pickled, needs_torch
from penstock.workers._starting import StartMethod, WorkerProcess
from penstock.workers._worker import fail_setup, flush_printed

__all__ = [
    "Channel",
    "Cluster",
    "Crew",
    "Patience",
    "Pickled",
    "SentError",
    "ServerLease",
    "StartMethod",
    "WarmUp",
    "WorkerProcess",
    "abandon_in_forks",
    "create_shared_memory",
    "describe_death",
    "describe_ending",
    "describe_silence",
    "fail_setup",
    "flush_printed",
    "grow_shared_memory",
    "guard_life_line",
    "is_crash",
    "lease_early",
    "may_lack_memory",
    "needs_torch",
]
