"""Where bytes come from and how they get there: maps, positioned reads, durable writes, locks.

    read:    MappedFile (local disks) or PositionedFile (network) behind one protocol, FileReader
    write:   create_file, or DirectFile past the page cache -> rename -> sync_directory
    name:    local_path, a path as people give it; similar_path, what they may have meant
    guard:   DirectoryLock, one writer at a time; OpenFolder, a folder by its descriptor, which follows no links;
             check_trusted, a folder that nobody else can write to; user_cache, where such folders are

Knows nothing of shards or columns.

May import: `errors`. Imported by: `cli`, `dataset`, `doctor`, `loader`, `plan`, `preparation`, `remote`,
`service`, `shards`, `sources`, `transforms`, `tuning`, `watching`. Holds state: the locks held by this process, weakly,
so that a forked child lets go of them.
"""

from penstock.filesystem._durable import (
    AlignedBuffers,
    DirectFile,
    create_file,
    make_directory,
    put_in_place,
    remove_if_present,
    remove_tree,
    rename,
    storage_errors,
    sync_directory,
)
from penstock.filesystem._guard import DirectoryLock, OpenFolder, check_trusted, lock_holder, user_cache
from penstock.filesystem._paths import (
    expand_braces,
    filesystem_type,
    is_network_filesystem,
    is_url,
    local_path,
    matching_paths,
    similar_path,
)
from penstock.filesystem._readers import FileReader, MappedFile, PositionedFile, open_regular, read_small

__all__ = [
    "AlignedBuffers",
    "DirectFile",
    "DirectoryLock",
    "FileReader",
    "MappedFile",
    "OpenFolder",
    "PositionedFile",
    "check_trusted",
    "create_file",
    "expand_braces",
    "filesystem_type",
    "is_network_filesystem",
    "is_url",
    "local_path",
    "lock_holder",
    "make_directory",
    "matching_paths",
    "open_regular",
    "put_in_place",
    "read_small",
    "remove_if_present",
    "remove_tree",
    "rename",
    "similar_path",
    "storage_errors",
    "sync_directory",
    "user_cache",
]
