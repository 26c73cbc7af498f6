"""What a server counts, and how Prometheus reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.service._connections import Connections
from penstock.service._dispatcher import Dispatcher


@dataclass(slots=True)
class ServerStatistics:
    """Totals since the server was started; written by the server's thread alone."""

    num_requests: int = 0
    """Requests of any kind."""
    num_refused: int = 0
    """Requests without the token."""
    num_answers: int = 0
    """Answers with batches that were sent whole."""
    num_steps: int = 0
    """Batches in them."""
    num_bytes: int = 0
    num_broken_off: int = 0
    """Answers that their readers did not take, or not in time."""
    num_waiting: int = 0
    """Requests that wait for their answer now."""


def metrics_page(statistics: ServerStatistics, dispatcher: Dispatcher, connections: Connections) -> str:
    """Everything, in Prometheus's text format."""
    return "".join(_lines(statistics, dispatcher, connections))


def _lines(statistics: ServerStatistics, dispatcher: Dispatcher, connections: Connections) -> Iterator[str]:
    computed = dispatcher.statistics
    times = os.times()
    yield _metric("requests_total", "counter", "Requests of any kind.", statistics.num_requests)
    yield _metric("refused_total", "counter", "Requests without the token.", statistics.num_refused)
    yield _metric("answers_total", "counter", "Answers with batches that were sent whole.", statistics.num_answers)
    yield _metric("batches_total", "counter", "Batches sent.", statistics.num_steps)
    yield _metric("sent_bytes_total", "counter", "Bytes of the answers sent.", statistics.num_bytes)
    yield _metric("broken_off_total", "counter", "Answers not taken by their readers.", statistics.num_broken_off)
    yield _metric("shared_total", "counter", "Requests that another had computed.", computed.num_shared)
    yield _metric("failed_total", "counter", "Answers that could not be computed.", computed.num_failed)
    yield _metric("produce_seconds_total", "counter", "Time workers took.", computed.produce_seconds)
    yield _metric("worker_cpu_seconds_total", "counter", "Processor time of workers.", computed.cpu_seconds)
    yield _metric("cpu_seconds_total", "counter", "Processor time of the server itself.", times.user + times.system)
    yield _metric("waiting", "gauge", "Requests that wait for their answer.", statistics.num_waiting)
    yield _metric("queued", "gauge", "Requests that workers have before them.", dispatcher.num_queued)
    yield _metric("workers", "gauge", "Worker processes.", dispatcher.num_workers)
    yield _metric("connections", "gauge", "Open connections.", connections.num_open)
    yield _metric("clients", "gauge", "Addresses with open connections.", len(connections.by_address))


def _metric(name: str, kind: str, help_text: str, value: float) -> str:
    return f"# HELP penstock_{name} {help_text}\n# TYPE penstock_{name} {kind}\npenstock_{name} {value}\n"
