"""A worker process: receives items, writes batches into shared memory, answers where they lie.

# NOTE [the life-line]
#   Every process that Penstock starts holds the read end of a pipe whose write end only the trainer has.
#   A thread waits for its end of file and ends the process at once: the trainer closed it, exited, or was
#   killed, and no code of a user can delay that. A parent-death signal would not do: it fires when the
#   *thread* that started the process ends, and never in a process started by a fork server.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

from penstock.loader._channel import Channel
from penstock.loader._compute import compute
from penstock.loader._memory import Slot
from penstock.loader._work import Work

_MAX_TRACE = 60_000


def hold_life_line(descriptor: int) -> None:
    """End this process when the trainer is gone. See NOTE [the life-line]."""

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(0)

    threading.Thread(target=watch, name="penstock-life-line", daemon=True).start()


def run_worker(channel: Channel, life_line: int, work: Work | None = None) -> None:
    """Compute items until the trainer says stop or is gone. Never returns."""
    hold_life_line(life_line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the trainer decides
    try:
        _serve(channel, work)
    except (EOFError, ConnectionError):
        pass
    finally:
        os._exit(0)


def _serve(channel: Channel, work: Work | None) -> None:
    slots: dict[int, Slot] = {}
    while True:
        message, descriptors = channel.receive()
        kind, *fields = message
        if kind == "work":
            work = _load_work(channel, *fields)
        elif kind == "drop":
            slots.pop(fields[0], None)
        elif kind == "run":
            ticket, item, number = fields
            if descriptors:
                slots[number] = Slot(descriptors[0])
            assert work is not None
            _run(channel, work, ticket, item, slots[number])


def _load_work(channel: Channel, path: list[str], main_path: str | None, pickled: bytes) -> Work | None:
    """Unpickle the work as the trainer would; a failure is reported for the first item."""
    sys.path[:] = path
    try:
        if main_path is not None:
            from multiprocessing import spawn  # the user's script, imported only when a function lives in it

            spawn.import_main_path(main_path)
        work: Work = pickle.loads(pickled)  # noqa: S301 - sent by the trainer that started this process
        return work
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
        channel.send(("broken", *_describe(error)))
        raise EOFError from None


def _run(channel: Channel, work: Work, ticket: int, item: Any, slot: Slot) -> None:
    try:
        answer: tuple[Any, ...] = ("done", ticket, compute(work, item, slot))
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
        answer = ("failed", ticket, *_describe(error))
    channel.send(answer)


def _describe(error: BaseException) -> tuple[bytes | None, str]:
    """(the error, pickled if it can be; its traceback as text)."""
    text = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - our own bytes: some errors pickle and do not come back
    except Exception:  # noqa: BLE001 - then the text alone must do
        return None, text
    return (pickled if len(pickled) < _MAX_TRACE else None), text
