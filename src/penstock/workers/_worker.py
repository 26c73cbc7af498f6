"""What runs in a worker process: one program, from its first message to the end of the channel."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from penstock.workers._channel import Channel
from penstock.workers._failures import PackedError
from penstock.workers._forks import abandon_in_forks
from penstock.workers._parcel import receive_program

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Program(Protocol):
    """What a worker process does: plain data that can be pickled, with the code to run."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Answer the owner's messages until `EOFError`.

        The life-line is held already. Who runs users' functions guards it, who forks passes it on.
        """
        ...


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """Worker: my program could not be loaded, or could not begin; this is the last message."""

    error: PackedError


def run_sent_program(descriptor: int, life_line: int) -> NoReturn:
    """Be a worker whose owner sends the program as its first message."""
    run_program(Channel.of_descriptor(descriptor), life_line, None)


def run_program(channel: Channel, life_line: int, program: Program | None) -> NoReturn:
    """Be a worker: run the program, or the one that the owner sends first, until the owner closes the channel."""
    leave_signals_to_owner()
    end = _WorkerEnd(channel)
    abandon_in_forks(end)
    try:
        (program or _receive_program(channel)).run(channel, life_line)
        _leave()
    except (EOFError, ConnectionError):
        _leave()
    except BaseException as error:  # noqa: BLE001 - a mistake of ours: the owner sees the exit, people see the reason
        if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK):
            error.add_note("A function closed a descriptor that is not its own: the channel to this worker's owner.")
        traceback.print_exception(error)
    os._exit(1)


def _leave() -> NoReturn:
    """End well; what was put into a `multiprocessing.Queue` is sent first, by a thread that would end with us."""
    if "multiprocessing.queues" in sys.modules:
        from multiprocessing import util

        util._run_finalizers()  # type: ignore[attr-defined] # only those of this process
    os._exit(0)


def fail_setup(channel: Channel, error: BaseException) -> NoReturn:
    """Tell the owner why this worker cannot work, and end."""
    channel.send(SetupFailed(PackedError.pack(error)))
    raise EOFError from None


def leave_signals_to_owner() -> None:
    """Ctrl-C, and the SIGTERM of a cluster, may reach every process; the owner decides what to do about them.

    A handler and not SIG_IGN, which programs that the user's functions start would inherit. An event loop of the
    owner that wakes up with signals would take those of a forked worker for its own.
    """
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def hold_signals() -> None:
    """Keep Ctrl-C and SIGTERM from this thread, and from a process it forks, until they are left to the owner."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def flush_printed() -> None:
    """Write out what was printed, if there is anywhere to write it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, one that nobody reads
        sys.stdout.flush()


class _WorkerEnd:
    """A worker's end of its channel, which children of the user's functions must not keep."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def abandon(self) -> None:
        """A child with the channel would hide this worker's death, and never end when it is terminated."""
        self._channel.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _receive_program(channel: Channel) -> Program:
    try:
        return cast(Program, receive_program(channel))
    except EOFError:
        raise
    except BaseException as error:  # noqa: BLE001 - it is raised in the owner
        fail_setup(channel, error)
    finally:
        gc.enable()
