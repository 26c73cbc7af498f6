"""A worker process: receives items, writes batches into shared memory, answers where they lie."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from typing import Any, NoReturn

from penstock.loader._channel import Channel
from penstock.loader._compute import compute
from penstock.loader._memory import Slot
from penstock.loader._work import Work

is_importing_main = False
"""Whether the user's script is being imported in a worker: it must not start workers of its own then."""


def run_worker(channel: Channel, life_line: int, work: Work | None = None) -> NoReturn:
    """Compute items until the trainer closes the channel. The life-line is held already, and stays so."""
    leave_signals_to_trainer()
    os.register_at_fork(after_in_child=channel.close)  # else a child of the user's would hide this worker's death
    try:
        _serve(channel, work)
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a mistake of ours: the trainer sees the exit, people see the reason
        traceback.print_exc()
    os._exit(1)


def leave_signals_to_trainer() -> None:
    """Ctrl-C, and the SIGTERM of a cluster, may reach every process; what to do about them the trainer decides.

    A handler and not SIG_IGN, which programs that the user's functions start would inherit.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _serve(channel: Channel, work: Work | None) -> None:
    slots: dict[int, Slot] = {}
    while True:
        message, descriptors = channel.receive()
        kind, *fields = message
        if kind == "work":
            work = _load_work(channel, *fields)
        else:
            ticket, item, number, dropped = fields
            for old in dropped:
                del slots[old]
            if descriptors:
                slots[number] = Slot(number, descriptors[0])
            assert work is not None
            _run(channel, work, ticket, item, slots[number])


def _load_work(channel: Channel, preparation: dict[str, Any], pickled: bytes) -> Work:
    """Unpickle the work as the trainer would."""
    global is_importing_main
    try:
        from multiprocessing import spawn  # it imports the user's script, if a function lives there

        is_importing_main = True
        spawn.prepare(preparation)
        is_importing_main = False
        work: Work = pickle.loads(pickled)  # noqa: S301 - sent by the trainer that started this process
        return work
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
        channel.send(("broken", *_describe(error)))
        raise EOFError from None


def _run(channel: Channel, work: Work, ticket: int, item: Any, slot: Slot) -> None:
    try:
        answer = pickle.dumps(("done", ticket, compute(work, item, slot)))
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
        answer = pickle.dumps(("failed", ticket, *_describe(error)))
    sys.stdout.flush()  # what the user's functions print, before a kill can take it along
    channel.send_pickled(answer)


def _describe(error: BaseException) -> tuple[bytes | None, str, str]:
    """(the error, or its type alone, pickled; its message; its traceback as text)."""
    text = "".join(traceback.format_exception(error))
    for form in (error, type(error)):
        try:
            pickled = pickle.dumps(form)
            pickle.loads(pickled)  # noqa: S301 - our own bytes: some errors pickle and do not come back
            return pickled, str(error), text
        except Exception:  # noqa: BLE001, S112 - then less of it must do
            continue
    return None, text.strip().splitlines()[-1], text
