"""Files on any fsspec filesystem, a plain path being a local one. A file appears whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from timeline.errors import Invalid
from timeline.files import write_whole
from timeline.storage_plugins import shown


def at(url: str) -> tuple[Any, str]:
    """The filesystem and the path in it that `url` names. Raises Invalid for a scheme that is unknown or lacks its
    package, with fsspec's words, and for credentials before a bucket."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as bad:
        raise Invalid(f"{shown(url)!r} is no place for files: {bad}") from bad
    if "@" in path.partition("/")[0]:
        raise Invalid(
            f"{shown(url)!r}: credentials are not taken from a URL, which is shown and logged: put them into the "
            "environment, as the filesystem's documentation says"
        )
    return filesystem, path


def joined(url: str, *names: str) -> str:
    """`url` with more names behind it."""
    return "/".join([url.rstrip("/"), *names])


def write_bytes(url: str, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    filesystem, path = at(url)
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(path, data)  # an object store shows an object once it is complete
        return
    write_whole(path, data)


def write_json(url: str, told: Any) -> None:
    """Writes JSON, for people too."""
    write_bytes(url, (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(url: str) -> Any:
    """What a JSON file says; None when there is none. Raises Invalid for what is no JSON."""
    filesystem, path = at(url)
    if not filesystem.exists(path):
        return None
    try:
        return json.loads(filesystem.cat_file(path))
    except (ValueError, RecursionError) as wrong:
        raise Invalid(f"{shown(url)} is no JSON, it was changed or is damaged: {wrong}") from wrong


def write_table(url: str, table: pa.Table) -> int:
    """Writes a Parquet file, whole or not at all; its size in bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue()
    write_bytes(url, data.to_pybytes())
    return int(data.size)


def names_in(url: str, suffix: str = "") -> list[str]:
    """The paths of all files below `url` that end in `suffix`, in order; none when it is not there."""
    filesystem, path = at(url)
    if not filesystem.exists(path):
        return []
    return sorted(name for name in filesystem.find(path) if name.endswith(suffix))


def remove(url: str) -> None:
    """Takes a file or a folder away, if it is there."""
    filesystem, path = at(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)
