"""What do servers cost? Against a bare Arrow Flight stream of the same bytes, and against the same workers run here.

1. Shuffled batches of uint16 tokens over loopback, from a server with one worker, in the clear and with mutual TLS;
   beside them a Flight stream of messages made beforehand, of the size of the answers. Bursts take turns; the client's
   CPU is that of all its threads. The server gathers its batches, the Flight server has them ready.
2. Batches that take their workers long, as images do: two workers on a server against two workers of the loader.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from _machine import print_result

import penstock
from penstock.service import make_certificates

ROW, BATCH, MIB = 2048, 32, 1 << 20
MESSAGE_BYTES = 8 * MIB


def augment(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """About what decoding and cropping a small photograph takes."""
    image = rng.normal(row["x"][0], 1, (224, 224, 3)).astype(np.float32)
    return {"image": np.clip(image, 0, 255).astype(np.uint8)}


def token_plan() -> penstock.Plan:
    tokens = np.random.default_rng(0).integers(0, 65536, (16384, ROW), dtype=np.uint16)
    return penstock.from_arrays({"x": tokens}).shuffle(seed=1).batch(BATCH)


def image_plan() -> penstock.Plan:
    return penstock.from_arrays({"x": np.zeros((1 << 16, 1), np.uint8)}).map(augment).batch(16)


PLANS = {"tokens": token_plan, "images": image_plan}


class FlightServer(flight.FlightServerBase):
    """Sends the same messages again and again."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        column = pa.array(np.random.default_rng(0).integers(0, 65536, MESSAGE_BYTES // 2, dtype=np.uint16))
        self._message = pa.record_batch([column], ["x"])

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        """As many messages as the ticket says."""
        messages = itertools.repeat(self._message, int(ticket.ticket))
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(self._message.schema, messages))


def serve(what: str, workers: int, keys: str | None) -> None:
    """The child: serve until the parent closes standard input."""
    with contextlib.ExitStack() as stack:
        if what == "flight":
            address = f"127.0.0.1:{stack.enter_context(FlightServer()).port}"
        else:
            security = security_of(keys, "server")
            server = penstock.serve(PLANS[what](), "127.0.0.1:0", num_workers=workers, security=security)
            address = stack.enter_context(server).address
        print(json.dumps(address), flush=True)
        sys.stdin.read()


def security_of(keys: str | None, side: str) -> penstock.Security:
    if keys is None:
        return penstock.Security()
    folder = Path(keys)
    return penstock.Security(
        certificate=folder / f"{side}.pem", key=folder / f"{side}.key", authority=folder / "authority.pem"
    )


@contextlib.contextmanager
def child(what: str, workers: int = 1, keys: str | None = None) -> Iterator[str]:
    """The address of a server in a process of its own."""
    options = ["--serve", what, "--workers", str(workers), *(["--keys", keys] if keys else [])]
    process = subprocess.Popen(
        [sys.executable, __file__, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def remote_loader(plan: penstock.Plan, address: str, keys: str | None = None) -> penstock.DataLoader:
    remote = penstock.Remote(servers=address, security=security_of(keys, "client"))
    return penstock.DataLoader(plan, remote=remote, epochs=None)


def taking(batches: Iterator[Any], count: int) -> Callable[[], None]:
    def burst() -> None:
        for _ in range(count):
            next(batches)

    return burst


def flight_burst(client: flight.FlightClient, count: int) -> None:
    for chunk in client.do_get(flight.Ticket(str(count).encode())):
        chunk.data.column(0).to_numpy()


def take_turns(bursts: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, seconds of CPU) of each candidate in each round, after one round that does not count."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in bursts}
    for number in range(rounds + 1):
        for name, burst in bursts.items():
            begin, cpu = time.perf_counter(), time.process_time()
            burst()
            if number:
                spent[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    return spent


def ratio(spent: dict[str, list[tuple[float, float]]], of: str, to: str, what: int) -> float:
    """Median over rounds of what one candidate spends as a share of what another does."""
    return statistics.median(ours[what] / theirs[what] for ours, theirs in zip(spent[of], spent[to], strict=True))


def bench_tokens(rounds: int, mib: int) -> None:
    plan = token_plan()
    count = mib * MIB // (BATCH * ROW * 2)
    with tempfile.TemporaryDirectory() as keys, contextlib.ExitStack() as stack:
        make_certificates(keys, ["127.0.0.1"])
        bare = stack.enter_context(flight.connect(f"grpc://{stack.enter_context(child('flight'))}"))
        plain = stack.enter_context(remote_loader(plan, stack.enter_context(child("tokens"))))
        address = stack.enter_context(child("tokens", keys=keys))
        sealed = stack.enter_context(remote_loader(plan, address, keys))
        bursts = {
            "Flight": lambda: flight_burst(bare, mib * MIB // MESSAGE_BYTES),
            "server": taking(iter(plain), count),
            "server, mutual TLS": taking(iter(sealed), count),
        }
        spent = take_turns(bursts, rounds)
    figures: dict[str, Any] = {
        f"{name}, MB/s": mib * 1.048576 / statistics.median(seconds for seconds, _ in each)
        for name, each in spent.items()
    }
    for name in ("server", "server, mutual TLS"):
        figures[f"{name}: rate of Flight's"] = ratio(spent, "Flight", name, 0)
        figures[f"{name}: CPU of Flight's client"] = ratio(spent, name, "Flight", 1)
    settings = {"rounds": rounds, "mib": mib, "batch": f"{BATCH}x{ROW} uint16"}
    print_result("What do batches from a server cost?", settings, figures, "pyarrow", "aiohttp")


def bench_images(rounds: int, count: int) -> None:
    plan = image_plan()
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(penstock.DataLoader(plan, num_workers=2, epochs=None))
        there = stack.enter_context(remote_loader(plan, stack.enter_context(child("images", 2))))
        bursts = {"workers here": taking(iter(here), count), "workers of a server": taking(iter(there), count)}
        spent = take_turns(bursts, rounds)
    figures: dict[str, Any] = {
        f"{name}, batches/s": count / statistics.median(seconds for seconds, _ in each) for name, each in spent.items()
    }
    figures["rate of workers here"] = ratio(spent, "workers here", "workers of a server", 0)
    print_result("Do workers of a server do as much?", {"rounds": rounds, "batches": count}, figures, "aiohttp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--mib",
        type=int,
        default=1024,
        help="size of one burst; what is prefetched between bursts should be little of it",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=120,
        help="batches of one burst of images; what is computed ahead should be little of it",
    )
    parser.add_argument("--serve", choices=["flight", *PLANS], help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.workers, arguments.keys)
        return
    bench_tokens(arguments.rounds, arguments.mib)
    bench_images(arguments.rounds, arguments.batches)


if __name__ == "__main__":
    main()
