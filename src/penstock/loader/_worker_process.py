"""Both ends of one worker process: what it is sent, what it answers, and the slots it writes to.

engine (`ItemWorker`)                        worker process (`ComputeItems`)
its number, the number of workers ------->   work.begin(…), if the work has it
                                      <---   Started: from now on it computes
(ticket, item, slot, slots to close) ---->   computes the item into the slot; the descriptor of a slot that is
                                             new to it comes with the message
                                      <---   Finished, or 36 bytes if the layout was sent before
                                      <---   Failed
"""

import pickle
import struct
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.loader._engine import Computed, ItemRunner, Work
from penstock.loader._layout import BatchLayout
from penstock.loader._memory import Slot, SlotPool
from penstock.workers import (
    Channel,
    SentError,
    WorkerProcess,
    describe_silence,
    fail_setup,
    flush_printed,
    guard_life_line,
)

_KNOWN_LAYOUT = struct.Struct("<qIddq")
"""A finished item in a few bytes: ticket, number of its layout, seconds to produce, CPU seconds, page faults.

Pickling the layout of every item would add 6 us to the 29 that a batch of 8 x 128 tokens takes
(`benchmarks/bench_loader.py --only small`).
"""


class Started(NamedTuple):
    """From a worker: it has started, and imported all it needs."""


class Finished(NamedTuple):
    """From a worker: the item is computed."""

    ticket: int
    layout: BatchLayout
    number: int | None
    """How the layout is referred to from now on."""
    costs: tuple[float, float, int]


class Failed(NamedTuple):
    """From a worker: computing the item raised this."""

    ticket: int
    error: SentError


@dataclass(frozen=True, slots=True)
class ComputeItems:
    """The worker's program."""

    work: Work

    def run(self, channel: Channel, life_line: int) -> None:
        """Compute items until the engine closes the channel."""
        guard_life_line(life_line)
        self._begin(channel)
        channel.send_pickled(pickle.dumps(Started()))
        answers = _Answers(channel, self.work)
        slots: dict[int, Slot] = {}
        while True:
            (ticket, item, number, closed), descriptors = channel.receive()
            for old in closed:
                slots.pop(old, None)  # after a Ctrl-C it may be said twice
            if descriptors:
                slots[number] = Slot(number, descriptors[0])
            answers.answer(ticket, item, slots[number])

    def _begin(self, channel: Channel) -> None:
        """Let the work set itself up in this process, if it wants to."""
        (number, num_workers), _ = channel.receive()
        begin = getattr(self.work, "begin", None)
        try:
            if begin is not None:
                begin(number, num_workers)
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's next()
            fail_setup(channel, error)


class _Answers:
    """A worker's answers to the engine. A recurring layout is sent once, then only its number."""

    def __init__(self, channel: Channel, work: Work) -> None:
        self._channel = channel
        self._runner = ItemRunner(work)
        self._numbers: dict[BatchLayout, int] = {}

    def answer(self, ticket: int, item: Any, slot: Slot) -> None:
        """Compute an item and send where it lies, or what went wrong."""
        number = None
        try:
            layout, *costs = self._runner.compute(item, slot)
            number = self._numbers.get(layout)
            answer = self._describe(ticket, layout, costs) if number is None else b""
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's next()
            answer = pickle.dumps(Failed(ticket, SentError.pack(error)))
        flush_printed()  # before a kill can lose it
        if number is None:
            self._channel.send_pickled(answer)
        else:
            self._channel.send_bytes(_KNOWN_LAYOUT.pack(ticket, number, *costs))

    def _describe(self, ticket: int, layout: BatchLayout, costs: Any) -> bytes:
        number = len(self._numbers) if layout.is_lasting else None
        answer = pickle.dumps(Finished(ticket, layout, number, tuple(costs)))
        if number is not None:
            self._numbers[layout] = number
        return answer


class ItemWorker:
    """A worker process as the engine sees it."""

    def __init__(self, process: WorkerProcess, num_workers: int) -> None:
        self.process, self.number = process, process.number
        """The process, and its number among all that were ever started."""
        self.pool = SlotPool(Slot)
        self.outstanding: dict[int, tuple[Any, Slot]] = {}
        """Items by ticket; the first is the one being computed."""
        self.is_leaving = False
        self._busy_since = time.monotonic()
        """When it started on the item that it is computing."""
        self.is_started = False
        """Whether it has finished importing, and computes."""
        self._open: set[int] = set()
        """Slots that the process has open."""
        self._to_close: list[int] = []
        """Slots that it should close, sent with the next item."""
        self._layouts: dict[int, BatchLayout] = {}
        """Layouts that it refers to by number."""
        process.send((self.number, num_workers))

    def give(self, ticket: int, item: Any) -> bool:
        """Send an item; False if so much is waiting for this worker that it must answer first."""
        slot = self.pool.take()
        descriptors = () if slot.number in self._open else (slot.descriptor,)
        if not self.outstanding:
            self._busy_since = time.monotonic()
        self.outstanding[ticket] = (item, slot)  # before sending it, so that its answer is always expected
        if not self.process.send((ticket, item, slot.number, self._to_close), descriptors, is_patient=False):
            del self.outstanding[ticket]
            self.pool.give_back(slot)
            return False
        self._to_close = []
        self._open.add(slot.number)
        return True

    def receive(self) -> tuple[int, Slot, Computed | BaseException] | None:
        """(ticket, slot, result or error) of an item; None if the message only says that the worker has started.

        Raises:
            EOFError: the process is dead.
            Exception: it could not be set up, for this reason.
        """
        message = self.process.receive()
        self._busy_since, self.is_started = time.monotonic(), True
        if type(message) is Started:
            return None
        outcome: Computed | BaseException
        if type(message) is bytes:
            ticket, number, *costs = _KNOWN_LAYOUT.unpack(message)
            outcome = Computed(self._layouts[number], *costs)
        elif type(message) is Finished:
            ticket = message.ticket
            if message.number is not None:
                self._layouts[message.number] = message.layout
            outcome = Computed(message.layout, *message.costs)
        else:
            ticket = message.ticket
            item = self.outstanding[ticket][0]
            outcome = message.error.rebuild(f"in worker process {self.number}, while computing {item}")
        return ticket, self._take_slot(ticket), outcome

    def describe(self, pid: int | None) -> str:
        """What it is doing; only if it has something to do."""
        item = next(iter(self.outstanding.values()))[0]
        doing = f"computing {item}" if self.is_started else f"starting, to compute {item},"
        return describe_silence(f"worker {self.number}", pid, doing, time.monotonic() - self._busy_since)

    def drop_spare_slots(self) -> bool:
        """Drop superfluous slots, on both sides; return whether there were any."""
        slots = self.pool.shrink()
        if not slots:
            return False
        dropped = {slot.number for slot in slots}
        self._to_close += dropped & self._open
        self._open -= dropped
        return True

    def _take_slot(self, ticket: int) -> Slot:
        """The slot of an item that was answered; answers come in order."""
        while True:
            oldest = next(iter(self.outstanding))
            _, slot = self.outstanding.pop(oldest)
            if oldest == ticket:
                return slot
            self.pool.give_back(slot)  # a Ctrl-C came before this one was sent, or before its answer was read
