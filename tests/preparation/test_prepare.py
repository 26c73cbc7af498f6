"""From raw files to a dataset: every document once, the same bytes whatever the engine, and where each came from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import DatasetExists, FormatError, SchemaError
from penstock.packing import PackingSettings, build_pack_index, index_name
from penstock.preparation import Progress, prepare
from penstock.shards import read_manifest
from penstock.transforms import FunctionTransform, Tokenize

from .corpora import assert_holds, contents, decoded, make_corpus, provenance, stray_files, write_jsonl
from .functions import lengths

SHARD = 20_000
BYTES = Tokenize("bytes")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, make_corpus(folder)


@pytest.fixture(scope="module")
def reference(corpus: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("reference") / "data"
    prepare(f"{corpus[0]}/*.jsonl", destination, transform=BYTES, workers=1, shard_bytes=SHARD)
    return destination


def test_every_document_is_there_once_and_in_order(corpus: tuple[Path, list[str]], reference: Path) -> None:
    assert_holds(reference, corpus[1])
    assert decoded(reference) == corpus[1]


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_the_output_is_the_same_to_the_byte_for_any_number_of_workers(
    corpus: tuple[Path, list[str]], reference: Path, tmp_path: Path, workers: int
) -> None:
    prepare(f"{corpus[0]}/*.jsonl", tmp_path / "data", transform=BYTES, workers=workers, shard_bytes=SHARD)
    assert contents(tmp_path / "data") == contents(reference)


def test_the_summary_counts_what_was_done(
    corpus: tuple[Path, list[str]], tmp_path: Path, worker_processes: None
) -> None:
    seen: list[Progress] = []
    done = prepare(
        f"{corpus[0]}/*.jsonl",
        tmp_path / "data",
        transform=BYTES,
        workers=1,
        shard_bytes=SHARD,
        on_progress=seen.append,
    )
    assert done.num_samples == len(corpus[1])
    assert done.num_tokens == sum(len(text.encode()) for text in corpus[1])
    assert done.tasks_run > 3
    assert done.tasks_kept == 0
    assert set(done.worker_seconds) == {"read", "transform", "write"}
    assert all(seconds > 0 for seconds in done.worker_seconds.values())
    assert all(0 < done.processor_seconds[stage] < done.seconds["total"] for stage in done.worker_seconds)
    assert 0 < done.peak_worker_bytes < 1 << 30
    assert seen[-1].tasks == seen[-1].total_tasks == done.tasks_run
    assert seen[-1].documents == done.num_samples
    assert seen[-1].raw_bytes == seen[-1].total_bytes
    run = json.loads((tmp_path / "data" / "run.json").read_text())
    assert run["workers"] == 1
    assert "host" in run


def test_nothing_of_time_host_or_workers_is_in_the_manifest(reference: Path) -> None:
    text = (reference / "manifest.json").read_text()
    assert "seconds" not in text
    assert "host" not in text
    assert '"workers"' not in text


def test_each_sample_can_be_traced_to_its_row(corpus: tuple[Path, list[str]], reference: Path) -> None:
    origins = provenance(reference)["origins"]
    texts = decoded(reference)
    first = 0
    for file, begin, end, num_samples, rows in origins["splits"]:
        assert rows is None
        raw = Path(origins["files"][file]).read_bytes()
        # A line belongs to the split in which it begins.
        starts = [0, *(place + 1 for place, byte in enumerate(raw) if byte == 10)]
        lines = [raw[start:].split(b"\n", 1)[0] for start in starts if begin <= start < end and start < len(raw)]
        assert [json.loads(line)["text"] for line in lines] == texts[first : first + num_samples]
        first += num_samples
    assert first == len(texts)


def test_without_a_transform_columns_are_kept(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 50, 1)
    prepare(tmp_path / "a.jsonl", tmp_path / "data", workers=1)
    ds = penstock.open(tmp_path / "data")
    assert [sample["text"].decode() for sample in ds] == texts
    assert ds[[3, 4]]["id"].tolist() == [3, 4]


def test_a_function_may_give_any_number_of_samples_which_say_where_they_came_from(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 90, 1)
    prepare(
        tmp_path / "a.jsonl",
        tmp_path / "data",
        transform=FunctionTransform("preparation.functions:twice"),
        workers=1,
    )
    ds = penstock.open(tmp_path / "data")
    rows = [row for row in range(90) if row % 3 for _ in range(2)]
    assert ds[: len(ds)]["origin"].tolist() == [[0, row] for row in rows]
    assert ds[: len(ds)]["length"].tolist() == [len(texts[row]) for row in rows]


def test_a_function_needs_no_wrapper_and_what_is_no_transform_is_refused(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 9, 1)
    prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=lengths, workers=1)
    assert penstock.open(tmp_path / "data")[:9]["length"].tolist() == [len(text) for text in texts]
    for wrong in (Tokenize, "bytes"):
        with pytest.raises(TypeError, match="or a function of a batch"):
            prepare(tmp_path / "a.jsonl", tmp_path / "other", transform=wrong, workers=1)
    assert not (tmp_path / "other").exists()


def test_a_transform_that_takes_our_column_name_is_told_so(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    with pytest.raises(SchemaError, match="column 'origin', a reserved name"):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "data",
            transform=FunctionTransform("preparation.functions:with_origin"),
            workers=1,
        )
    assert not (tmp_path / "data").exists()


def test_sources_that_match_nothing_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        prepare(tmp_path / "*.jsonl", tmp_path / "data", transform=BYTES, workers=1)
    assert not (tmp_path / "data").exists()


def test_rows_of_this_process_are_prepared_in_it(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(100)]
    prepare(rows, tmp_path / "data", transform=BYTES)
    assert_holds(tmp_path / "data", [row["text"] for row in rows])


def test_a_shuffle_permutes_all_documents_and_keeps_their_origins(
    corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    for workers, name in ((1, "one"), (2, "two")):
        prepare(f"{corpus[0]}/*.jsonl", tmp_path / name, transform=BYTES, workers=workers, shard_bytes=SHARD, shuffle=7)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert_holds(tmp_path / "one", corpus[1])
    texts = decoded(tmp_path / "one")
    assert texts != corpus[1]
    # No file's documents stay together: neighbours come from one of six uneven files by chance alone (0.2).
    files = [text.split()[0] for text in texts]
    together = np.mean([left == right for left, right in itertools.pairwise(files)])
    assert 0.1 < together < 0.3
    assert "shuffle_key" not in penstock.open(tmp_path / "one").schema
    _assert_origins_lead_to_the_text(tmp_path / "one", texts)


def _assert_origins_lead_to_the_text(folder: Path, texts: list[str]) -> None:
    section = provenance(folder)["origins"]
    numbers = {path: number for number, path in enumerate(section["files"])}
    ds = penstock.open(folder)
    for index in range(0, len(ds), 37):
        split, row = ds[index]["origin"].tolist()
        file, begin, end = section["splits"][split][:3]
        raw = Path(section["files"][file]).read_bytes()
        starts = [0, *(place + 1 for place, byte in enumerate(raw) if byte == 10)]
        start = [start for start in starts if begin <= start < end][row]
        assert json.loads(raw[start:].split(b"\n", 1)[0])["text"] == texts[index]
    assert len(numbers) == len(section["files"])


@pytest.mark.stress
def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 300, 1)
    for seed in (1, 2):
        prepare(tmp_path / "a.jsonl", tmp_path / str(seed), transform=BYTES, workers=1, shuffle=seed)
        assert_holds(tmp_path / str(seed), texts)
    assert decoded(tmp_path / "1") != decoded(tmp_path / "2")


def test_stored_pack_counts_are_those_that_packing_would_count(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    source = f"{corpus[0]}/*.jsonl"
    prepare(source, tmp_path / "data", transform=BYTES, workers=1, shard_bytes=SHARD, pack=[512, 1024])
    stored = read_manifest(tmp_path / "data").attributes["packing"]["indexes"]
    ds = penstock.open(tmp_path / "data")
    lengths = ds.lengths("tokens")
    for length in (512, 1024):
        settings = PackingSettings(length=length)
        counted = build_pack_index(lambda begin, end: lengths[begin:end], len(ds), settings)
        assert stored[index_name("tokens", settings)] == counted.to_json()
        by_shard = stored[index_name("tokens", settings, by_shard=True)]
        assert by_shard["window_starts"] == ds.storage.starts.tolist()
        counted = build_pack_index(lambda begin, end: lengths[begin:end], len(ds), settings, ds.storage.starts)
        assert by_shard == counted.to_json()
        assert ds.shuffle(1, lanes=2).pack(length).num_rows == sum(by_shard["window_rows"])


def test_pack_counts_can_be_added_later_without_preparing_again(
    corpus: tuple[Path, list[str]], reference: Path, tmp_path: Path
) -> None:
    source = f"{corpus[0]}/*.jsonl"
    prepare(source, tmp_path / "data", transform=BYTES, workers=1, shard_bytes=SHARD)
    again = prepare(source, tmp_path / "data", transform=BYTES, workers=1, shard_bytes=SHARD, pack=[512])
    assert again.tasks_run == 0
    assert "packing" in read_manifest(tmp_path / "data").attributes
    shards = {name: digest for name, digest in contents(reference).items() if name != "manifest.json"}
    assert shards.items() <= contents(tmp_path / "data").items()


def test_pack_without_tokens_is_refused_before_any_work(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    with pytest.raises(SchemaError, match="ragged column 'tokens'"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", workers=1, pack=[512])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, "workers=0; give a number of processes"),
        ({"engine": "slurm"}, "the choices are 'local' and 'ray'"),
        ({"on_error": "ignore"}, "the choices are 'raise' and 'skip'"),
        ({"max_skipped": 3}, "with on_error='skip'"),
        ({"shard_bytes": 0}, "shard_bytes=0; it must be at least 1"),
        ({"address": "here:1"}, "needs engine='ray'"),
        ({"pack": [0]}, "numbers of tokens, at least 1"),
        ({"pack": 0}, "numbers of tokens, at least 1"),
        ({"shuffle": True}, "shuffle=True; give an integer seed"),
        ({"shuffle": 1, "origins": "manifest"}, "leave origins= out"),
    ],
)
def test_a_wrong_choice_is_an_error_before_anything_happens(tmp_path: Path, wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "*.jsonl", tmp_path / "data", **wrong)
    assert not (tmp_path / "data").exists()


class TestBadRows:
    def corpus(self, folder: Path) -> list[str]:
        """Three bad rows of two kinds in 60."""
        good = write_jsonl(folder / "a.jsonl", 30, 1)
        lines = (folder / "a.jsonl").read_text().splitlines()
        lines[4:4] = ["{not json", json.dumps({"text": None, "id": 1})]
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
        good += write_jsonl(folder / "b.jsonl", 27, 2)
        with open(folder / "b.jsonl", "a") as file:
            file.write("{broken\n")
        return good

    def test_the_first_one_stops_the_run_and_is_named(self, tmp_path: Path) -> None:
        self.corpus(tmp_path)
        with pytest.raises(FormatError, match=r"a\.jsonl: row 4.*on_error='skip'"):
            prepare(tmp_path / "*.jsonl", tmp_path / "data", transform=BYTES, workers=1)
        assert not (tmp_path / "data" / "manifest.json").exists()

    def test_skipping_counts_them_by_reason_and_keeps_the_first_places(self, tmp_path: Path) -> None:
        good = self.corpus(tmp_path)
        done = prepare(tmp_path / "*.jsonl", tmp_path / "data", transform=BYTES, workers=2, on_error="skip")
        assert_holds(tmp_path / "data", good)
        assert sum(done.skipped.values()) == 3
        section = read_manifest(tmp_path / "data").attributes["skipped"]
        assert section["rows"] == 3
        assert section["by_reason"] == done.skipped
        assert [(Path(each["path"]).name, each["row"]) for each in section["first"]] == [
            ("a.jsonl", 4),
            ("a.jsonl", 5),
            ("b.jsonl", 27),
        ]

    def test_rows_behind_a_skipped_one_are_traced_rightly(self, tmp_path: Path) -> None:
        self.corpus(tmp_path)
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=BYTES, workers=1, on_error="skip")
        (split,) = provenance(tmp_path / "data")["origins"]["splits"]
        assert split[3:] == [30, [[0, 0, 1], [4, 6, 1]]]

    def test_more_than_allowed_stop_the_run(self, tmp_path: Path) -> None:
        self.corpus(tmp_path)
        with pytest.raises(FormatError, match=r"3 rows .* skipped, more than max_skipped=2 allows"):
            prepare(tmp_path / "*.jsonl", tmp_path / "data", transform=BYTES, workers=1, on_error="skip", max_skipped=2)
        assert not (tmp_path / "data" / "manifest.json").exists()
        done = prepare(
            tmp_path / "*.jsonl", tmp_path / "data", transform=BYTES, workers=1, on_error="skip", max_skipped=3
        )
        assert sum(done.skipped.values()) == 3

    def test_a_strict_rerun_does_not_keep_tasks_that_skipped(self, tmp_path: Path) -> None:
        self.corpus(tmp_path)
        arguments = {"transform": BYTES, "workers": 1}
        with pytest.raises(FormatError, match="max_skipped"):
            prepare(tmp_path / "*.jsonl", tmp_path / "data", on_error="skip", max_skipped=2, **arguments)
        with pytest.raises(FormatError, match="row 4"):
            prepare(tmp_path / "*.jsonl", tmp_path / "data", **arguments)

    def test_a_damaged_file_is_one_skip_or_an_error_with_its_name(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl", 30, 1)
        (tmp_path / "b.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
        sources = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
        with pytest.raises(FormatError, match=r"b\.parquet"):
            prepare(sources, tmp_path / "data", transform=BYTES, workers=1)


def test_a_foreign_dataset_is_not_touched_without_overwrite(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 5, 1)
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}) as writer:
        writer.write({"x": 1})
    before = contents(tmp_path / "data")
    with pytest.raises(DatasetExists, match="not made by `penstock prepare`"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=BYTES, workers=1)
    assert contents(tmp_path / "data") == before
    prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=BYTES, workers=1, overwrite=True)
    assert_holds(tmp_path / "data", texts)


def test_samples_that_another_writer_appended_are_not_dropped(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 5, 1)
    sources, destination = tmp_path / "*.jsonl", tmp_path / "data"
    prepare(sources, destination, transform=BYTES, workers=1)
    with penstock.DatasetWriter(destination, {"tokens": "uint8[*]"}, mode="append") as writer:
        writer.write({"tokens": np.frombuffer(b"more", np.uint8)})
    assert prepare(sources, destination, transform=BYTES, workers=1).num_samples == 6
    before, more = contents(destination), write_jsonl(tmp_path / "b.jsonl", 2, 1)
    for options in ({}, {"pack": [8]}):
        with pytest.raises(DatasetExists, match="appended 1 sample to the dataset there, which this run would drop"):
            prepare(sources, destination, transform=BYTES, workers=1, **options)
        assert contents(destination) == before
    prepare(sources, destination, transform=BYTES, workers=1, overwrite=True)
    assert decoded(destination) == texts + more


def test_a_dataset_inside_its_source_folder_is_no_source(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 5, 1)
    prepare(tmp_path, tmp_path / "deep" / "data", transform=BYTES, workers=1)
    assert prepare(tmp_path, tmp_path / "deep" / "data", transform=BYTES, workers=1).tasks_run == 0
    assert not penstock.is_stale(tmp_path / "deep" / "data")
    prepare(f"{tmp_path}/**/*.json*", tmp_path / "other", transform=BYTES, workers=1)
    assert decoded(tmp_path / "other") == texts


def test_a_file_as_destination_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(NotADirectoryError, match=r"b\.jsonl: the destination is a file"):
        prepare(tmp_path / "a.jsonl", tmp_path / "b.jsonl", transform=BYTES, workers=1)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(DatasetExists, match=r"thesis\.tex"):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=BYTES, workers=1, overwrite=True)
    assert stray_files_of_no_dataset(tmp_path / "data") == {"thesis.tex"}


def stray_files_of_no_dataset(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_stray_files_are_noticed_by_these_tests(reference: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(reference, tmp_path / "copy")
    (tmp_path / "copy" / ".preparing").mkdir()
    assert stray_files(tmp_path / "copy") == {".preparing"}
