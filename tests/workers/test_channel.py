"""Messages between processes."""

from __future__ import annotations

import os
import resource

import pytest

from penstock.workers import Channel


def test_messages_of_any_size_stay_whole_and_in_order() -> None:
    ours, theirs = Channel.pair()
    sizes = [0, 1, 1000, (1 << 14) - 20, 1 << 14, (1 << 14) + 1, 1 << 17, 5 << 20]
    for size in sizes:
        ours.send(("run", b"x" * size))
    for size in sizes:
        assert theirs.receive() == (("run", b"x" * size), ())


def test_descriptors_arrive_beside_messages_and_are_not_inherited() -> None:
    ours, theirs = Channel.pair()
    before = len(os.listdir("/proc/self/fd"))
    for size in (1, 1 << 20):
        ours.send(b"y" * size, (0, 1))
        message, descriptors = theirs.receive()
        assert len(message) == size
        assert len(descriptors) == 2
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_inbox_is_said_to_the_impatient_and_loses_nothing() -> None:
    ours, theirs = Channel.pair()
    sent = 0
    with pytest.raises(BlockingIOError):  # noqa: PT012
        while True:
            ours.send(sent, is_patient=False)
            sent += 1
    assert sent > 50
    assert [theirs.receive()[0] for _ in range(sent)] == list(range(sent))


def test_what_the_other_side_sent_before_it_died_is_read_before_its_end() -> None:
    """Linux says ECONNRESET first when mail for the dead was unread; its own last words come all the same."""
    ours, theirs = Channel.pair()
    ours.send("unread")
    theirs.send("last words")
    theirs.close()
    assert ours.receive() == ("last words", ())
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(ConnectionError):
        ours.send("hello?")


def test_a_process_without_free_descriptors_says_so() -> None:
    ours, theirs = Channel.pair()
    ours.send("take these", (0, 1, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError, match="ulimit -n"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
