"""Small files that unpack to large ones, and too little memory for a sound one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import FormatError

from .gathering import gather

PEAK = """
import json, resource, sys
from penstock.sources import SourceOptions, list_files, plan_splits, read_split
options = SourceOptions(**json.loads(sys.argv[2]))
num_rows = 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for split in plan_splits(list_files(sys.argv[1], options), options, 1 << 30):
    for records in read_split(split, options):
        num_rows += records.num_rows
        largest = max(column.nbytes for column in records.columns.values())
        assert records.num_rows == 1 or largest < 16 << 20, largest
print(json.dumps([num_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""

LITTLE_MEMORY = """
import os, resource, sys
import penstock, pyarrow, pyarrow.parquet, penstock.preparation
with open("/proc/self/statm") as file:
    in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (in_use + (100 << 20),) * 2)
try:
    penstock.prepare(sys.argv[1], sys.argv[2], on_error="skip", workers=1)
except MemoryError as error:
    print(error)
"""

LONG = "x" * 100_000
NUM_ROWS = 16_000  # 1.6 GB of text


def read_in_child(path: Path, **options: object) -> tuple[int, int]:
    """Rows of a file, and by how many MB a process grew that read them."""
    given = [sys.executable, "-c", PEAK, str(path), json.dumps(options)]
    done = subprocess.run(given, capture_output=True, text=True, preexec_fn=limit_memory, check=False)
    assert done.returncode == 0, done.stderr
    num_rows, num_kilobytes = json.loads(done.stdout)
    return num_rows, num_kilobytes >> 10


def limit_memory() -> None:
    """A bomb that goes off must not take the machine with it."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


def repeated(value: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value])).cast(
        pa.dictionary(pa.int32(), pa.string())
    )


def write_text(path: Path) -> None:
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="zstd") as writer:
        block = pa.table({"text": pa.array([LONG] * 1000)})
        writer.write_table(pa.concat_tables([block] * (NUM_ROWS // 1000)), row_group_size=NUM_ROWS)


def write_short_rows_first(path: Path) -> None:
    values = pa.array(["a", LONG])
    short, long = NUM_ROWS // 2, NUM_ROWS // 2
    column = pa.DictionaryArray.from_arrays(pa.array([0] * short + [1] * long, pa.int32()), values)
    pq.write_table(pa.table({"text": column}), path, row_group_size=NUM_ROWS, store_schema=False)


def write_dictionaries(path: Path) -> None:
    pq.write_table(pa.table({"text": repeated(LONG, NUM_ROWS)}), path, row_group_size=NUM_ROWS)


def write_lists(path: Path) -> None:
    texts = pa.ListArray.from_arrays(pa.array(range(0, NUM_ROWS + 1, 10), pa.int32()), repeated(LONG, NUM_ROWS))
    pq.write_table(pa.table({"text": texts}), path, row_group_size=NUM_ROWS, store_schema=False)


def write_arrow_dictionaries(path: Path) -> None:
    table = pa.table({"text": repeated(LONG, NUM_ROWS)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_views(path: Path) -> None:
    one = pa.array([LONG]).cast(pa.string_view())
    view, data = one.buffers()[1:]
    views = pa.py_buffer(view.to_pybytes()[:16] * NUM_ROWS)
    column = pa.Array.from_buffers(pa.string_view(), NUM_ROWS, [None, views, data])
    table = pa.table({"text": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("write", "name", "num_rows"),
    [
        (write_text, "a.parquet", NUM_ROWS),
        (write_arrow_views, "a.arrow", NUM_ROWS),
        *(
            pytest.param(*case, marks=pytest.mark.stress)
            for case in (
                (write_short_rows_first, "a.parquet", NUM_ROWS),
                (write_dictionaries, "a.parquet", NUM_ROWS),
                (write_lists, "a.parquet", NUM_ROWS // 10),
                (write_arrow_dictionaries, "a.arrow", NUM_ROWS),
            )
        ),
    ],
)
def test_values_that_many_rows_share_take_no_more_memory_than_a_batch(
    tmp_path: Path, write: Callable[[Path], None], name: str, num_rows: int
) -> None:
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 2 << 20
    rows, megabytes = read_in_child(tmp_path / name)
    assert rows == num_rows
    assert megabytes < 500


@pytest.mark.parametrize(
    "name", [pytest.param("a.parquet", marks=pytest.mark.stress), "a.arrow", "a.jsonl.zst", "a.jsonl"]
)
def test_a_sound_file_is_not_skipped_for_want_of_memory(tmp_path: Path, name: str) -> None:
    write_large(tmp_path / name)
    given = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path / name), str(tmp_path / "data")]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{tmp_path / name}: out of memory while reading"), done.stderr
    assert not (tmp_path / "data" / "manifest.json").exists()


def write_large(path: Path) -> None:
    """One value of 150 MB."""
    table = pa.table({"text": pa.array(["x" * (150 << 20)])})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", use_dictionary=False)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".jsonl":
        path.write_bytes(b'{"text": "' + b"x" * (150 << 20) + b'"}\n')
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as sink:
            sink.write(b'{"text": "' + b"x" * (150 << 20) + b'"}\n')


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def write_long_header(path: Path, kind: bytes) -> None:
    """A header of 1 GB, most of it a hole; as pax, one record, and as a sparse file, a map."""
    size = 1 << 30
    record = b"%d comment=" % size
    with path.open("wb") as file:
        file.write(header(kind, size) + (record if kind in b"xg" else b""))
        file.truncate(512 + size)
        file.seek(0, 2)
        file.write(header(tarfile.REGTYPE, 0) + bytes(1024))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_of_a_tar_take_little_memory(tmp_path: Path, kind: bytes) -> None:
    write_long_header(tmp_path / "a.tar", kind)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="a header has more than 1,048,576 bytes"):
            gather(tmp_path / "a.tar")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_many_headers_before_one_member_and_many_global_ones_are_refused(tmp_path: Path) -> None:
    long_name = header(tarfile.GNUTYPE_LONGNAME, 512) + b"a" * 512
    end = header(tarfile.REGTYPE, 0) + bytes(1024)
    (tmp_path / "chain.tar").write_bytes(long_name * 900 + end)
    (tmp_path / "extended.tar").write_bytes(sparse_header() + sparse_blocks(10_000) + end)
    (tmp_path / "global.tar").write_bytes(b"".join(map(global_member, range(40))) + bytes(1024))
    for name, message in (
        ("chain", "at byte 0"),
        ("extended", "more than 1,048,576"),
        ("global", "its global headers"),
    ):
        with pytest.raises(FormatError, match=message):
            gather(tmp_path / f"{name}.tar")


def sparse_header() -> bytes:
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[482] = 1  # more of the map follows
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def sparse_blocks(count: int) -> bytes:
    entries = b"00000000001\0" * 42
    return (entries + b"\1" + bytes(7)) * count


def global_member(number: int) -> bytes:
    value = b"x" * 50_000
    record = b" key%04d=%b\n" % (number, value)
    record = b"%d" % (len(record) + 5) + record
    padding = bytes(-len(record) % 512)
    member = tarfile.TarInfo(f"{number}.txt").tobuf(tarfile.USTAR_FORMAT)
    return header(tarfile.XGLTYPE, len(record)) + record + padding + member


def test_names_of_thousands_of_characters_are_still_names(tmp_path: Path) -> None:
    name = "a/" * 2000 + "b.txt"
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=form) as archive:
            archive.addfile(tarfile.TarInfo(name))
    rows, errors = gather(tmp_path)
    assert [row["__key__"] for row in rows] == [name.removesuffix(".txt")] * 2
    assert not errors
