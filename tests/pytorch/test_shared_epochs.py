"""The next epoch is known to every worker of a dataset, however it was started, and to no other copy."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pytorch._stream import SharedEpochs


def begin_one(epochs: SharedEpochs) -> None:
    epochs.begin(3, epochs.next_epoch(3))


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.stress)])
def test_a_worker_and_its_parent_count_together(method: str) -> None:
    epochs = SharedEpochs()
    epochs.set_next(7)
    worker = multiprocessing.get_context(method).Process(target=begin_one, args=(epochs,))
    worker.start()
    worker.join()
    assert (epochs.next_epoch(3), epochs.next_epoch(0)) == (8, 7)
    assert epochs.is_used_elsewhere


def test_a_copy_in_a_process_that_is_no_child_counts_on_its_own() -> None:
    epochs = SharedEpochs()
    epochs.set_next(7)
    copy = pickle.loads(pickle.dumps(epochs))
    begin_one(copy)
    assert (epochs.next_epoch(3), copy.next_epoch(3)) == (7, 8)


@pytest.mark.stress
def test_a_file_that_took_the_descriptor_since_is_not_taken_for_the_epochs() -> None:
    epochs = SharedEpochs()
    epochs.set_next(7)
    pickled = pickle.dumps(epochs)
    descriptor = epochs._descriptor
    del epochs
    other = SharedEpochs()
    assert other._descriptor == descriptor
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).next_epoch(0))"
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True)
    assert done.stdout == b"7\n"


@pytest.mark.stress
def test_a_worker_of_a_worker_counts_together_with_both() -> None:
    epochs = SharedEpochs()
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()).begin(3, 7)"
    subprocess.run(["sh", "-c", f'"$0" -c "{code}"; true', sys.executable], input=pickle.dumps(epochs), check=True)
    assert epochs.next_epoch(3) == 8


def test_the_warning_is_given_once_in_all_processes() -> None:
    epochs = SharedEpochs()
    if (child := os.fork()) == 0:
        os._exit(0 if epochs.may_warn() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not epochs.may_warn()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import penstock
assert [record["text"] for record in penstock.stream(sys.argv[1])] == ["a", "b"]
"""


@pytest.mark.stress
def test_streams_work_where_files_may_not_be_large(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "a.txt"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
