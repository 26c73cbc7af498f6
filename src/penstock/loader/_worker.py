"""A worker process: receives items, writes batches into shared memory, answers where they lie."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import sys
import traceback
from typing import Any, NoReturn

from penstock.loader._channel import Channel
from penstock.loader._compute import Computer
from penstock.loader._layout import Layout
from penstock.loader._memory import Slot
from penstock.loader._work import Work

KNOWN_LAYOUT = struct.Struct("<qIddq")
"""A finished item in a few bytes: ticket, number of its layout, seconds to produce, processor seconds, page faults."""

is_importing_main = False
"""Whether the user's script is being imported in a worker: it must not start workers of its own then."""


def run_worker(channel: Channel, life_line: int, work: Work | None = None) -> NoReturn:
    """Compute items until the trainer closes the channel. The life-line is held already, and stays so."""
    leave_signals_to_trainer()
    os.register_at_fork(after_in_child=lambda: _let_go(channel))
    try:
        _serve(channel, work)
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a mistake of ours: the trainer sees the exit, people see the reason
        traceback.print_exc()
    os._exit(1)


def leave_signals_to_trainer() -> None:
    """Ctrl-C, and the SIGTERM of a cluster, may reach every process; what to do about them the trainer decides.

    A handler and not SIG_IGN, which programs that the user's functions start would inherit. An event loop of the
    trainer's that wakes up with signals would take those of a forked worker for its own.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def flush_printed() -> None:
    """Write out what was printed, if there is anywhere to write it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, one that nobody reads
        sys.stdout.flush()


def _let_go(channel: Channel) -> None:
    """In a child of the user's: it would hide this worker's death, and wait for ever for who terminates it."""
    channel.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(channel: Channel, work: Work | None) -> None:
    slots: dict[int, Slot] = {}
    answers: Answers | None = None
    while True:
        message, descriptors = channel.receive()
        kind, *fields = message
        if kind == "work":
            work = _load_work(channel, *fields)
        elif kind == "begin":
            assert work is not None
            _begin(channel, work, *fields)
        else:
            ticket, item, number, dropped = fields
            for old in dropped:
                slots.pop(old, None)  # a Ctrl-C can have it said twice
            if descriptors:
                slots[number] = Slot(number, descriptors[0])
            if answers is None:
                assert work is not None
                answers = Answers(channel, work)
            answers.answer(ticket, item, slots[number])


class Answers:
    """What a worker tells the trainer. A layout that comes again and again is sent once, then only its number."""

    def __init__(self, channel: Channel, work: Work) -> None:
        self._channel = channel
        self._computer = Computer(work)
        self._numbers: dict[Layout, int] = {}

    def answer(self, ticket: int, item: Any, slot: Slot) -> None:
        """Compute an item and say where it lies, or what went wrong."""
        is_known = False
        try:
            layout, *costs = self._computer.compute(item, slot)
            number = self._numbers.get(layout)
            is_known = number is not None
            if is_known:
                answer = KNOWN_LAYOUT.pack(ticket, number, *costs)
            else:
                number = len(self._numbers) if layout.is_lasting else None
                answer = pickle.dumps(("done", ticket, layout, number, costs))
                if number is not None:
                    self._numbers[layout] = number
        except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
            answer = pickle.dumps(("failed", ticket, *_describe(error)))
        flush_printed()  # before a kill can take it along
        if is_known:
            self._channel.send_bytes(answer)
        else:
            self._channel.send_pickled(answer)


def _begin(channel: Channel, work: Work, number: int, num_workers: int) -> None:
    """Let the work make itself ready in this process, if it wants to."""
    begin = getattr(work, "begin", None)
    try:
        if begin is not None:
            begin(number, num_workers)
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's next()
        channel.send(("broken", *_describe(error)))
        raise EOFError from None


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
