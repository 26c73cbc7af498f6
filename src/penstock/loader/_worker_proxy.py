"""The trainer's side of one worker process: its channel, the slots it writes into, and what it was given to do."""

from __future__ import annotations

from typing import Any

from penstock.loader._compute import Computed
from penstock.loader._diagnosis import rebuild_error
from penstock.loader._engine import Result
from penstock.loader._layout import Layout
from penstock.loader._memory import Slot, SlotPool
from penstock.loader._starting import Started
from penstock.loader._worker import KNOWN_LAYOUT


class WorkerProxy:
    """A worker process as the engine sees it."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.pool = SlotPool(Slot)
        self.outstanding: dict[int, tuple[Any, Slot]] = {}
        """Items by ticket; the first is the one being computed."""
        self.is_leaving = False
        self._known: set[int] = set()
        """Slots that the process has open."""
        self._dropped: list[int] = []
        """Slots that it is to close, said with the next item."""
        self._layouts: dict[int, Layout] = {}
        """Layouts that it refers to by number."""

    @property
    def number(self) -> int:
        """Its number among all that were ever started."""
        return self.started.number

    def greet(self, work: tuple[Any, ...] | None, num_workers: int) -> None:
        """Say what the work is, unless it was forked with it, and let it begin."""
        if work is not None:
            self._send(work)
        self._send(("begin", self.number, num_workers))

    def give(self, ticket: int, item: Any) -> bool:
        """Send an item; False when so much waits for this worker already that it must answer first."""
        slot = self.pool.take()
        descriptors = () if slot.number in self._known else (slot.descriptor,)
        self.outstanding[ticket] = (item, slot)  # before it is sent: an answer to it must not come as a surprise
        if not self._send(("run", ticket, item, slot.number, self._dropped), descriptors):
            del self.outstanding[ticket]
            self.pool.give_back(slot)
            return False
        self._dropped = []
        self._known.add(slot.number)
        return True

    def hear(self) -> tuple[int, Slot, Computed | BaseException]:
        """(ticket, slot, what came of it) of the item that it says is finished.

        Raises:
            EOFError: the process is dead.
            Exception: what it could not be set up for.
        """
        message, _ = self.started.channel.receive()
        outcome: Computed | BaseException
        if type(message) is bytes:
            ticket, number, *costs = KNOWN_LAYOUT.unpack(message)
            outcome = Computed(self._layouts[number], *costs)
        elif message[0] == "broken":
            raise rebuild_error(*message[1:], note=f"while worker process {self.number} was being set up")
        elif message[0] == "done":
            _, ticket, layout, number, costs = message
            if number is not None:
                self._layouts[number] = layout
            outcome = Computed(layout, *costs)
        else:
            _, ticket, *described = message
            item = self.outstanding[ticket][0]
            outcome = rebuild_error(*described, note=f"in worker process {self.number}, while computing {item}")
        while True:
            oldest = next(iter(self.outstanding))
            _, slot = self.outstanding.pop(oldest)
            if oldest == ticket:
                return ticket, slot, outcome
            self.pool.give_back(slot)  # answers come in turn: a Ctrl-C came before this one was sent, or heard

    def hand_over(self, slot: Slot, computed: Computed, was_ready: bool) -> Result:
        """The batches that it wrote into a slot."""
        batches = self.pool.hand_over(slot, computed.layout)
        return Result(batches, computed.layout.num_bytes, was_ready, self.number, *computed[1:])

    def let_go(self) -> None:
        """Drop slots that are too many, on both sides."""
        dropped = {slot.number for slot in self.pool.shrink()}
        if dropped:
            self._dropped += dropped & self._known
            self._known -= dropped

    def close(self) -> None:
        """The worker sees the end of file and exits."""
        self.started.channel.close()

    def _send(self, message: tuple[Any, ...], descriptors: tuple[int, ...] = ()) -> bool:
        """False when its inbox is full. If it is dead, its end of file will say so."""
        try:
            self.started.channel.send(message, descriptors, is_patient=False)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True
