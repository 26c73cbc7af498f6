"""What a loader counts, as people read it."""

from __future__ import annotations

from penstock.loader import LoaderStatistics


def test_statistics_read_as_lines_of_figures_with_their_units() -> None:
    counted = LoaderStatistics(
        num_batches=100,
        num_ready=97,
        num_bytes=25_000_000,
        wait_seconds=0.25,
        step_seconds=0.7,
        copy_seconds=0.05,
        produce_seconds=1.5,
        worker_cpu_seconds=1.25,
        num_workers=2,
        prefetch=4,
        num_queued=3,
        num_buffers=6,
        num_buffers_in_use=5,
        decisions=("step 22: 2 workers, after 0 workers: 80 % of the time is spent waiting for data",),
    )
    assert str(counted).splitlines() == [
        "batches       100  97 % were ready when asked for",
        "bytes       25 MB",
        "waiting    250 ms  25 % of the loop's time",
        "steps      700 ms",
        "copying     50 ms  into tensors, to the device",
        "computing   1.5 s  in workers, of which 1.25 s on a processor",
        "workers         2  4 batches ahead, 3 ready now",
        "buffers         6  5 in use",
        "step 22: 2 workers, after 0 workers: 80 % of the time is spent waiting for data",
    ]
    assert repr(counted).startswith("LoaderStatistics(num_batches=100,")


def test_statistics_of_a_loader_that_has_not_begun_can_be_printed() -> None:
    assert str(LoaderStatistics()).startswith("batches")
