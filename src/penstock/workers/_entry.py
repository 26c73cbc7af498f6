"""The first code that a worker process runs: hold the life-line, then run the program it is sent.

# NOTE [the life-line]
#   Every process that Penstock starts holds the read end of a pipe whose write end only its owner has.
#   When that closes, because the owner closed it, exited or was killed, the kernel sends SIGKILL to every
#   holder (F_SETSIG): at once, whatever it is doing, even while it is still importing or inside a C function
#   that keeps the GIL, where a waiting thread would not get to run. A parent-death signal would not do: it fires
#   when the *thread* that started the process ends, and never under a fork server.
#
#   A process that runs the user's functions also guards it: a thread polls the pipe. While it does, the kernel
#   keeps the pipe open whatever the process closes (`os.closerange`, as programs that become daemons do), so the
#   signal still comes. If /proc is not mounted there is no signal, and the thread ends the process itself.

This file is run by its path and imports only the standard library, so the life-line is held before numpy
and the user's modules are imported.
"""

import fcntl
import gc
import json
import os
import select
import signal
import sys
import threading
from typing import NoReturn


def hold_life_line(descriptor: int) -> int:
    """Have the kernel kill this process when its owner is gone; the descriptor returned replaces the one given.

    See NOTE [the life-line].
    """
    try:  # a file description of its own: it is what knows whom to signal, and forks share it
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        own = os.dup(descriptor)
    else:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    if _wait_for_end(descriptor, seconds=0):  # it closed before we asked for the signal
        os._exit(0)
    os.close(descriptor)
    return own


def guard_life_line(descriptor: int) -> None:
    """Keep the life-line from functions that close descriptors that are not theirs.

    For processes that run such functions; not for one that forks, which should have no threads.
    """
    threading.Thread(target=_guard, args=(descriptor,), name="penstock-life-line", daemon=True).start()


def _guard(descriptor: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # any signal would end the wait
    _wait_for_end(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(descriptor: int, seconds: float | None = None) -> bool:
    """Whether the pipe's other end has closed, or the descriptor is no longer the pipe's."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def _main() -> NoReturn:
    channel, life_line, path = sys.argv[1:]
    gc.disable()  # until the program is there: imports leave no garbage, and looking for it takes a tenth of their time
    held = hold_life_line(int(life_line))
    os.set_inheritable(int(channel), False)
    sys.path[:] = json.loads(path)

    from penstock.workers._channel import Channel
    from penstock.workers._worker import run_program

    run_program(Channel.of_descriptor(int(channel)), held, None)


if __name__ == "__main__":
    _main()
