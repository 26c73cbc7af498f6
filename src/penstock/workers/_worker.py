"""What runs in a worker process: one program, from its first message to the end of the channel."""

import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from penstock.workers._channel import Channel, abandon_in_forks
from penstock.workers._failures import SentError
from penstock.workers._program import receive_program

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Program(Protocol):
    """What a worker process runs: plain data that can be pickled, with its code."""

    def run(self, channel: Channel, life_line: int) -> None:
        """Answer the owner's messages until `EOFError`.

        The life-line is already held. A program that runs users' functions guards it; one that forks passes it on.
        """
        ...


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """A worker's last message: its program could not be loaded or set up."""

    error: SentError


def run_program(channel: Channel, life_line: int, program: Program | None) -> NoReturn:
    """Act as a worker: run the program, or the one that the owner sends first, until the owner closes the channel."""
    leave_signals_to_owner()
    end = _WorkerEnd(channel)
    abandon_in_forks(end)
    try:
        (program or _receive_program(channel)).run(channel, life_line)
        _leave()
    except (EOFError, ConnectionError):
        _leave()
    except BaseException as error:  # noqa: BLE001 - our own bug: the owner sees the exit, the user reads the reason
        if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK):
            error.add_note("A function closed a descriptor that was not its own: the channel to this worker's owner.")
        traceback.print_exception(error)
    os._exit(1)


def _leave() -> NoReturn:
    """Exit cleanly, after sending what was put into a `multiprocessing.Queue`, whose thread would end with us."""
    if "multiprocessing.queues" in sys.modules:
        from multiprocessing import util

        util._run_finalizers()  # type: ignore[attr-defined] # only those of this process
    os._exit(0)


def fail_setup(channel: Channel, error: BaseException) -> NoReturn:
    """Tell the owner why this worker cannot be set up, and end."""
    channel.send(SetupFailed(SentError.pack(error)))
    raise EOFError from None


def leave_signals_to_owner() -> None:
    """Ignore Ctrl-C and a cluster's SIGTERM, which may reach every process; the owner decides what to do about them.

    With a handler, not SIG_IGN, which programs that the user's functions start would inherit. And without the wake-up
    descriptor: an event loop of the owner would take a forked worker's signals for its own.
    """
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def hold_signals() -> None:
    """Block Ctrl-C and SIGTERM in this thread, and in a process it forks, until `leave_signals_to_owner`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def flush_printed() -> None:
    """Flush standard output, if there is any."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, closed, or nobody reads it
        sys.stdout.flush()


class _WorkerEnd:
    """A worker's end of its channel, which processes that the user's functions fork must not keep."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def abandon(self) -> None:
        """Close the channel: a child with it would hide this worker's death. And let SIGTERM end the child again."""
        self._channel.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _receive_program(channel: Channel) -> Program:
    try:
        return cast(Program, receive_program(channel))
    except EOFError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again in the owner
        fail_setup(channel, error)
    finally:
        gc.enable()
