"""Stopped in any way and run again: the same bytes, nothing lost or doubled; changed sources cost only themselves."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

import penstock
from penstock.errors import CorruptionError, DatasetExists, IncompleteDataset, StorageError, WriterBusy
from penstock.preparation import Progress, is_stale, prepare
from penstock.sources import SourceOptions
from penstock.transforms import Tokenize

from .corpora import assert_holds, contents, decoded, make_corpus, provenance, write_jsonl

SHARD = 20_000
BYTES = Tokenize("bytes")
TESTS = Path(__file__).parents[1]
SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
PREPARE = [sys.executable, "-m", "penstock.cli", "prepare"]


def command(source: Path, destination: Path, *more: str) -> list[str]:
    arguments = [f"{source}/*.jsonl", str(destination), "--tokenizer", "bytes", "--workers", "2"]
    return [*PREPARE, *arguments, "--shard-bytes", str(SHARD), *more]


def run_library(source: Path, destination: Path, **more: Any) -> penstock.preparation.Prepared:
    settings = {"transform": BYTES, "workers": 1, "shard_bytes": SHARD, **more}
    return prepare(f"{source}/*.jsonl", destination, **settings)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, make_corpus(folder, num_files=12, num_rows=400)


@pytest.fixture(scope="module")
def references(corpus: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What an undisturbed run gives, in order and shuffled."""
    folder = tmp_path_factory.mktemp("references")
    run_library(corpus[0], folder / "plain")
    run_library(corpus[0], folder / "shuffled", shuffle=3)
    return {name: contents(folder / name) for name in ("plain", "shuffled")}


def kill_at_random(process: subprocess.Popen[bytes], destination: Path, rng: random.Random) -> str:
    """Kill the parent or one of its workers, mostly while they work; say who it was and when."""
    parent = psutil.Process(process.pid)
    if rng.random() < 0.9:  # the rest falls anywhere, also into the start
        while process.poll() is None and not finished_tasks(destination):
            time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.6))
    try:
        workers = parent.children()
        victim = rng.choice(workers) if workers and rng.random() < 0.6 else parent
        when = "at work" if finished_tasks(destination) > 0 else "elsewhere"
        victim.kill()
    except psutil.NoSuchProcess:
        return "nobody"
    return f"{'parent' if victim is parent else 'worker'} {when}"


def disturb(source: Path, destination: Path, rng: random.Random, kills: int, *more: str) -> Counter[str]:
    """Run until done, with kills at random moments; what was hit."""
    hit: Counter[str] = Counter()
    while hit.total() - hit["nobody"] < kills:
        if (destination / "manifest.json").exists():
            shutil.rmtree(destination)  # it was faster than the kill: once more from the start
        with subprocess.Popen(command(source, destination, *more), cwd=TESTS, **SILENT) as process:
            while hit.total() - hit["nobody"] < kills and process.poll() is None:
                hit[kill_at_random(process, destination, rng)] += 1
            process.wait(60)
    subprocess.run(command(source, destination, *more), cwd=TESTS, check=True, timeout=60, **SILENT)
    return hit


@pytest.mark.stress
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("plain", ()),
        ("shuffled", ("--shuffle", "3")),
    ],
)
def test_kills_at_random_moments_change_no_byte(
    corpus: tuple[Path, list[str]],
    references: dict[str, dict[str, str]],
    tmp_path: Path,
    kind: str,
    more: tuple[str, ...],
) -> None:
    disturb(corpus[0], tmp_path / "data", random.Random(kind), 3, *more)
    assert contents(tmp_path / "data") == references[kind]
    assert_holds(tmp_path / "data", corpus[1])


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_fifty_kills_of_workers_and_of_the_parent_change_no_byte(
    corpus: tuple[Path, list[str]], references: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    hit: Counter[str] = Counter()
    for turn in range(10):
        kind, more = [("plain", ()), ("shuffled", ("--shuffle", "3"))][turn % 2]
        destination = tmp_path / str(turn)
        hit += disturb(corpus[0], destination, random.Random(turn), 5, *more)
        assert contents(destination) == references[kind]
        assert_holds(destination, corpus[1])
        shutil.rmtree(destination)
    print(hit)
    assert hit.total() - hit["nobody"] == 50
    assert min(hit["parent at work"], hit["worker at work"]) >= 10


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def finished_tasks(destination: Path) -> int:
    records = destination / ".preparing" / "records"
    return len(list(records.glob("*.json"))) if records.is_dir() else 0


def slow_command(source: Path, destination: Path) -> list[str]:
    return [
        *PREPARE,
        f"{source}/*.jsonl",
        str(destination),
        "--function",
        "preparation.functions:slowly",
        "--workers",
        "2",
        "--shard-bytes",
        "60000",
    ]


def test_every_process_is_gone_soon_after_the_parent_is_killed(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    with subprocess.Popen(slow_command(corpus[0], tmp_path / "data"), cwd=TESTS) as process:
        wait_for(lambda: finished_tasks(tmp_path / "data") >= 2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        process.kill()
    gone, alive = psutil.wait_procs(family, timeout=3)
    assert alive == []
    assert len(gone) == 2


def test_a_rerun_keeps_finished_tasks_and_says_so(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    with subprocess.Popen(slow_command(corpus[0], tmp_path / "data"), cwd=TESTS) as process:
        wait_for(lambda: finished_tasks(tmp_path / "data") >= 3)
        process.kill()
    with pytest.raises(IncompleteDataset):
        penstock.open(tmp_path / "data")
    kept = finished_tasks(tmp_path / "data")
    done = subprocess.run(
        [*slow_command(corpus[0], tmp_path / "data"), "--json"], cwd=TESTS, check=True, capture_output=True, timeout=60
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["tasks_kept"] == kept
    assert summary["tasks_run"] > 0
    assert summary["num_samples"] == len(corpus[1])


def test_a_second_run_on_one_destination_fails_at_once(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    with subprocess.Popen(slow_command(corpus[0], tmp_path / "data"), cwd=TESTS) as process:
        wait_for(lambda: finished_tasks(tmp_path / "data") >= 1)
        with pytest.raises(WriterBusy, match=f"process {process.pid} .* is writing here"):
            run_library(corpus[0], tmp_path / "data")
        assert process.poll() is None, "it waited for the first"
        assert process.wait(60) == 0
    assert len(penstock.open(tmp_path / "data")) == len(corpus[1])


def test_ctrl_c_stops_quickly_and_the_next_run_goes_on(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    with subprocess.Popen(
        slow_command(corpus[0], tmp_path / "data"), cwd=TESTS, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        wait_for(lambda: finished_tasks(tmp_path / "data") >= 2)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        _, message = process.communicate(timeout=5)
    assert process.returncode == 130
    kept = r"penstock: interrupted\. \d+ of \d+ tasks finished and kept; run the same command to continue\.\n"
    assert re.fullmatch(kept, message.decode())
    assert psutil.wait_procs(family, timeout=3)[1] == []
    assert finished_tasks(tmp_path / "data") >= 2
    subprocess.run(
        slow_command(corpus[0], tmp_path / "data"), cwd=TESTS, check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    assert len(penstock.open(tmp_path / "data")) == len(corpus[1])


class TestKilledWhileCommitting:
    """The commit is where finished work could be lost: it is cut off after each of its steps."""

    @pytest.mark.parametrize(
        "step", [pytest.param(step, marks=[] if step == 6 else pytest.mark.stress) for step in range(12)]
    )
    def test_the_finished_tasks_are_found_again(
        self,
        corpus: tuple[Path, list[str]],
        references: dict[str, dict[str, str]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        step: int,
    ) -> None:
        from penstock.shards import _workspace

        names = ["create_file", "sync_directory", "rename"]
        steps = iter(range(10**6))

        class Killed(BaseException):
            pass

        def cut(real: Callable[..., Any]) -> Callable[..., Any]:
            def cut_off(*arguments: Any) -> Any:
                if next(steps) == step:
                    raise Killed
                return real(*arguments)

            return cut_off

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(_workspace, name, cut(getattr(_workspace, name)))
            patch.setattr(_workspace.Workspace, "close", lambda self: self._lock.drop())
            with pytest.raises(Killed):
                run_library(corpus[0], tmp_path / "data")
        again = run_library(corpus[0], tmp_path / "data")
        assert again.tasks_run == 0
        assert contents(tmp_path / "data") == references["plain"]


def test_a_disk_that_refuses_is_named_and_the_next_run_goes_on(
    corpus: tuple[Path, list[str]], references: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    limit = f"ulimit -f 8; exec {' '.join(command(corpus[0], tmp_path / 'data', '--json'))}"
    done = subprocess.run(["bash", "-c", limit], cwd=TESTS, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    failure = json.loads(done.stdout.splitlines()[-1])
    assert failure["error"] == "StorageError"
    assert "limit on file size" in failure["message"]
    run_library(corpus[0], tmp_path / "data")
    assert contents(tmp_path / "data") == references["plain"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_told_with_what_is_free_and_leaves_no_part_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)

    def refuse(descriptor: int, *arguments: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *arguments)

    rows = [{"text": f"row {number}"} for number in range(50)]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match=r"No space left on device .* bytes are free there; make room"):
            prepare(rows, tmp_path / "data", transform=BYTES)
    assert not (tmp_path / "data").exists()
    prepare(rows, tmp_path / "data", transform=BYTES)
    assert_holds(tmp_path / "data", [row["text"] for row in rows])


class TestIncremental:
    def test_a_rerun_with_nothing_new_does_nothing(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 3, 100)
        run_library(tmp_path / "src", tmp_path / "data")
        before = contents(tmp_path / "data")
        again = run_library(tmp_path / "src", tmp_path / "data")
        assert again.tasks_run == 0
        assert again.notes == ("Nothing to do: up to date.",)
        assert contents(tmp_path / "data") == before

    def test_only_a_new_file_is_prepared_wherever_its_name_stands(self, tmp_path: Path) -> None:
        texts = make_corpus(tmp_path / "src", 3, 100)
        first = run_library(tmp_path / "src", tmp_path / "data")
        shards = {name for name in contents(tmp_path / "data") if name.startswith("shard")}
        new = write_jsonl(tmp_path / "src" / "aaa.jsonl", 40, 99)
        again = run_library(tmp_path / "src", tmp_path / "data")
        assert again.tasks_run == 1
        assert again.tasks_kept == first.tasks_run
        assert decoded(tmp_path / "data") == texts + new
        assert shards < set(contents(tmp_path / "data"))
        assert_holds(tmp_path / "data", texts + new)

    def test_a_changed_file_costs_the_task_it_is_in(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        texts = [write_jsonl(tmp_path / "src" / f"{number}.jsonl", 300, number) for number in range(4)]
        first = run_library(tmp_path / "src", tmp_path / "data")
        changed = write_jsonl(tmp_path / "src" / "1.jsonl", 310, 77)
        again = run_library(tmp_path / "src", tmp_path / "data")
        assert 0 < again.tasks_run < first.tasks_run
        assert_holds(tmp_path / "data", [*texts[0], *changed, *texts[2], *texts[3]])
        assert run_library(tmp_path / "src", tmp_path / "data").tasks_run == 0

    def test_a_removed_file_takes_its_documents_along(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 2, 300)
        kept = write_jsonl(tmp_path / "src" / "z.jsonl", 300, 9)
        run_library(tmp_path / "src", tmp_path / "data")
        for path in (tmp_path / "src").glob("part-*"):
            path.unlink()
        run_library(tmp_path / "src", tmp_path / "data", remove=True)
        assert_holds(tmp_path / "data", kept)

    def test_a_column_of_origins_stays_right_over_several_changes(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        texts = {
            f"{number}.jsonl": write_jsonl(tmp_path / "src" / f"{number}.jsonl", 200, number) for number in range(3)
        }
        for turn in range(3):
            run_library(tmp_path / "src", tmp_path / "data", origins="column")
            section = provenance(tmp_path / "data")["origins"]
            ds = penstock.open(tmp_path / "data")
            assert len(ds) == sum(map(len, texts.values()))
            for index, text in enumerate(decoded(tmp_path / "data")):
                split, row = ds[index]["origin"].tolist()
                file, begin = section["splits"][split][:2]
                name = Path(section["files"][file]).name
                assert begin or texts[name][row] == text
            name = f"{turn}.jsonl"
            texts[name] = write_jsonl(tmp_path / "src" / name, 150 + turn, 50 + turn)

    @pytest.mark.parametrize("origins", ["manifest", "column"])
    def test_a_shard_that_was_lost_is_made_again(self, tmp_path: Path, origins: str) -> None:
        texts = make_corpus(tmp_path / "src", 3, 300)
        run_library(tmp_path / "src", tmp_path / "data", origins=origins)
        first, *_, last = sorted((tmp_path / "data").glob("shard-*"))
        first.unlink()
        os.truncate(last, 100)
        again = run_library(tmp_path / "src", tmp_path / "data", origins=origins)
        assert again.tasks_run
        assert again.tasks_kept
        assert_holds(tmp_path / "data", texts)

    def test_a_lost_shard_of_a_shuffled_dataset_means_preparing_all_again(self, tmp_path: Path) -> None:
        texts = make_corpus(tmp_path / "src", 1, 300)
        run_library(tmp_path / "src", tmp_path / "data", shuffle=1)
        next((tmp_path / "data").glob("shard-*")).unlink()
        with pytest.raises(DatasetExists, match="the dataset there is shuffled, with 1 shard of it lost"):
            run_library(tmp_path / "src", tmp_path / "data", shuffle=1)
        run_library(tmp_path / "src", tmp_path / "data", shuffle=1, overwrite=True)
        assert_holds(tmp_path / "data", texts)

    def test_notes_of_the_sources_that_are_damaged_are_an_error_that_overwriting_mends(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        texts = write_jsonl(tmp_path / "src" / "a.jsonl", 50, 1)
        run_library(tmp_path / "src", tmp_path / "data")
        (notes,) = (tmp_path / "data").glob("provenance-*.json")
        os.truncate(notes, 10)
        with pytest.raises(CorruptionError, match=rf"{notes}: the file has 10 bytes"):
            run_library(tmp_path / "src", tmp_path / "data")
        assert not penstock.verify(tmp_path / "data").is_sound
        run_library(tmp_path / "src", tmp_path / "data", overwrite=True)
        assert_holds(tmp_path / "data", texts)

    def test_with_a_shuffle_it_says_why_it_cannot(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 2, 50)
        run_library(tmp_path / "src", tmp_path / "data", shuffle=1)
        assert run_library(tmp_path / "src", tmp_path / "data", shuffle=1).tasks_run == 0
        write_jsonl(tmp_path / "src" / "new.jsonl", 10, 5)
        with pytest.raises(DatasetExists, match="every document's place depends on all sources"):
            run_library(tmp_path / "src", tmp_path / "data", shuffle=1)
        done = run_library(tmp_path / "src", tmp_path / "data", shuffle=1, overwrite=True)
        assert done.num_samples == 50 + 100 + 10

    def test_a_changed_tokenizer_is_named_not_its_digest(self, tmp_path: Path) -> None:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        make_corpus(tmp_path / "src", 1, 5)
        run_library(tmp_path / "src", tmp_path / "data")
        told = r"\(tokenizer was bytes \([0-9a-f]{12}…\), is now tokenizer.json \([0-9a-f]{12}…\)"
        with pytest.raises(DatasetExists, match=told) as refused:
            run_library(tmp_path / "src", tmp_path / "data", transform=Tokenize(tmp_path / "tokenizer.json"))
        assert not re.search("[0-9a-f]{13}", str(refused.value))

    def test_a_changed_transform_is_named_and_refused_without_overwrite(self, tmp_path: Path) -> None:
        texts = make_corpus(tmp_path / "src", 2, 50)
        run_library(tmp_path / "src", tmp_path / "data")
        before = contents(tmp_path / "data")
        other = Tokenize("bytes", append_eos="<|eos|>")
        with pytest.raises(
            DatasetExists, match=r"a different transform \(append_eos was null, is now \d+\).*--overwrite"
        ):
            run_library(tmp_path / "src", tmp_path / "data", transform=other)
        assert contents(tmp_path / "data") == before
        run_library(tmp_path / "src", tmp_path / "data", transform=other, overwrite=True)
        assert len(penstock.open(tmp_path / "data")) == len(texts)
        assert penstock.open(tmp_path / "data").lengths("tokens").min() >= 1
        assert not set(before) & {name for name in contents(tmp_path / "data") if name.startswith("shard")}

    def test_unfinished_work_of_another_transform_is_refused_too(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 4, 100)
        with open(tmp_path / "src" / "z.jsonl", "w") as file:
            file.write("{broken\n")
        with pytest.raises(ValueError, match=r"z\.jsonl"):
            run_library(tmp_path / "src", tmp_path / "data")
        assert finished_tasks(tmp_path / "data") > 0
        other = Tokenize("bytes", append_eos="<|eos|>")
        with pytest.raises(DatasetExists, match="unfinished preparation is there, with a different transform"):
            run_library(tmp_path / "src", tmp_path / "data", transform=other)


def test_sources_that_change_during_the_run_are_told_and_read_anew(tmp_path: Path) -> None:
    make_corpus(tmp_path / "src", 2, 20)

    def meddle(progress: Progress) -> None:
        with open(tmp_path / "src" / "part-000.jsonl", "a") as file:
            file.write('{"text": "late"}\n')

    done = run_library(tmp_path / "src", tmp_path / "data", on_progress=meddle)
    assert [note.split(" (")[0] for note in done.notes] == ["1 source file changed during the run"]
    again = run_library(tmp_path / "src", tmp_path / "data")
    assert again.notes == ()
    assert "late" in decoded(tmp_path / "data")


class TestStaleness:
    def test_it_tells_new_changed_and_missing_files(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 3, 20)
        run_library(tmp_path / "src", tmp_path / "data")
        assert not is_stale(tmp_path / "data")
        assert str(is_stale(tmp_path / "data")) == "up to date"
        write_jsonl(tmp_path / "src" / "new.jsonl", 3, 1)
        write_jsonl(tmp_path / "src" / "part-000.jsonl", 3, 1)
        (tmp_path / "src" / "part-001.jsonl").unlink()
        stale = is_stale(tmp_path / "data")
        assert stale
        assert [Path(path).name for path in (*stale.new, *stale.changed, *stale.missing)] == [
            "new.jsonl",
            "part-000.jsonl",
            "part-001.jsonl",
        ]
        assert "1 source file new" in str(stale)

    def test_it_looks_where_and_for_what_the_preparation_looked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "a.py").write_text("pass")
        reading = SourceOptions(format="text")
        prepare("~/src", tmp_path / "data", transform=BYTES, reading=reading, workers=1)
        assert not is_stale(tmp_path / "data")

    def test_it_tells_another_transform(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 1, 20)
        run_library(tmp_path / "src", tmp_path / "data")
        assert not is_stale(tmp_path / "data", transform=BYTES)
        stale = is_stale(tmp_path / "data", transform=Tokenize("bytes", append_eos="<|eos|>"))
        assert stale
        assert "append_eos was null" in str(stale)

    def test_a_dataset_that_was_not_prepared_has_no_sources(self, tmp_path: Path) -> None:
        with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}) as writer:
            writer.write({"x": 1})
        with pytest.raises(IncompleteDataset, match="not made by"):
            is_stale(tmp_path / "data")


def test_changed_sources_give_the_samples_of_a_new_dataset_in_another_order(tmp_path: Path) -> None:
    make_corpus(tmp_path / "src", num_files=4, num_rows=50)
    for name in ("continued", "new"):
        run_library(tmp_path / "src", tmp_path / name)
    assert contents(tmp_path / "continued") == contents(tmp_path / "new"), "two new datasets are equal to the byte"
    write_jsonl(sorted((tmp_path / "src").iterdir())[0], 60, seed=99)
    run_library(tmp_path / "src", tmp_path / "continued")
    shutil.rmtree(tmp_path / "new")
    run_library(tmp_path / "src", tmp_path / "new")
    assert Counter(decoded(tmp_path / "continued")) == Counter(decoded(tmp_path / "new"))
    assert decoded(tmp_path / "continued") == decoded(tmp_path / "new")[60:] + decoded(tmp_path / "new")[:60]
