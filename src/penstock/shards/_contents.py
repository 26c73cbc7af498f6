"""Which files a manifest names, and what is wrong with a copy of one: how a cache knows what arrived."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.errors import PenstockError
from penstock.filesystem import PositionedFile
from penstock.shards._blocks import WINDOW_BYTES
from penstock.shards._layout import BLOCK_BYTES, CHECKSUMS, block_checksums, checksum
from penstock.shards._manifest import Manifest, read_manifest
from penstock.shards._shard import Shard

Span = tuple[int, int]


class DatasetContents:
    """The files of a dataset but the manifest: its shards in their order, then where they are from."""

    def __init__(self, manifest: Manifest) -> None:
        self._schema = manifest.schema
        self._entries = {shard.name: shard for shard in manifest.shards}
        self._provenance = manifest.provenance
        sizes = {name: shard.num_bytes for name, shard in self._entries.items()}
        if manifest.provenance is not None:
            sizes[manifest.provenance.name] = manifest.provenance.num_bytes
        self.sizes: Mapping[str, int] = sizes

    def find_damage(self, path: Path, name: str) -> list[Span]:
        """The bytes of a file at `path` that are not those of file `name`."""
        file = PositionedFile(path)
        if name not in self._entries:
            assert self._provenance is not None
            is_right = checksum(file.read(0, file.size)) == self._provenance.checksum
            return [] if is_right else [(0, file.size)]
        try:
            shard = Shard(file, self._entries[name], self._schema)
        except PenstockError:
            return [(0, file.size)]
        return _joined(_damaged_blocks(shard))


def read_contents(folder: Path) -> DatasetContents:
    """What the manifest in `folder` names; the files need not be there."""
    return DatasetContents(read_manifest(folder))


def _damaged_blocks(shard: Shard) -> Iterator[Span]:
    start, table = shard.entry.header_bytes, shard.layout.tensors[CHECKSUMS]
    try:
        checksums = shard.blocks.checksums()
    except PenstockError:  # nothing can be told of the rest yet
        yield start + table.begin, start + table.end
        return
    for tensor in shard.layout.tensors.values():
        for begin in range(0, tensor.num_bytes if tensor is not table else 0, WINDOW_BYTES):
            data = shard.blocks.read(tensor, begin, min(begin + WINDOW_BYTES, tensor.num_bytes))
            first = tensor.first_block + begin // BLOCK_BYTES
            for number, found in enumerate(block_checksums(data).tolist()):
                if found != checksums[first + number]:
                    at = tensor.begin + begin + number * BLOCK_BYTES
                    yield start + at, start + min(at + BLOCK_BYTES, tensor.end)


def _joined(spans: Iterator[Span]) -> list[Span]:
    """Spans that touch each other, as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
