"""A loop over a torch dataset whose batches pass through pinned memory, or on to a device."""

from __future__ import annotations

from typing import Any, Self

from penstock.pytorch._device_feed import DeviceFeed
from penstock.pytorch._pinning import PinningFeed
from penstock.pytorch._torch_loop import Loop


class FedLoop:
    """Hands over what a feed brings, and tells the loop: the feed takes batches ahead, the state counts the user's.

    It refers to the loop and not the loop to it: workers end with the last reference, not with a garbage collection.
    """

    def __init__(self, loop: Loop, feed: DeviceFeed | PinningFeed) -> None:
        self._loop, self._feed = loop, feed

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._loop)

    def __next__(self) -> Any:
        found = self._feed.next()
        if found is None:
            self._feed.close()
            self._loop.finish()
            raise StopIteration
        self._loop.hand_over(found[0])
        return found[1]
