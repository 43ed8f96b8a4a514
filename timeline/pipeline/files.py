"""Files on any fsspec filesystem. A plain path is a local one. A file appears whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from timeline.errors import Invalid
from timeline.files import no_filesystem, write_whole
from timeline.storage_plugins import shown


def at(url: str) -> tuple[Any, str]:
    """Return the filesystem of `url`, and the path in it. Raise Invalid for a scheme that is unknown or lacks its
    package, and for credentials in front of a bucket."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as bad:
        raise Invalid(f"{shown(url)!r} is no place for files: {no_filesystem(url, bad)}") from bad
    if "@" in path.partition("/")[0]:
        raise Invalid(
            f"{shown(url)!r}: credentials are not taken from a URL, because URLs are shown and logged. Put them into "
            "the environment, as the filesystem's documentation says"
        )
    return filesystem, path


def joined(url: str, *names: str) -> str:
    """Return `url` with `names` appended."""
    return "/".join([url.rstrip("/"), *names])


def write_bytes(url: str, data: bytes) -> None:
    """Write a file, whole or not at all."""
    filesystem, path = at(url)
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(path, data)  # an object store shows an object once it is complete
        return
    write_whole(path, data)


def write_json(url: str, told: Any) -> None:
    """Write JSON, indented."""
    write_bytes(url, (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(url: str) -> Any:
    """Return the content of a JSON file; None if it is missing. Raise Invalid if it is no JSON."""
    filesystem, path = at(url)
    if not filesystem.exists(path):
        return None
    try:
        return json.loads(filesystem.cat_file(path))
    except (ValueError, RecursionError) as wrong:
        raise Invalid(f"{shown(url)} is no JSON, it was changed or is damaged: {wrong}") from wrong


def write_table(url: str, table: pa.Table) -> None:
    """Write a Parquet file, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes(url, sink.getvalue().to_pybytes())


def names_in(url: str) -> list[str]:
    """Return the paths of all files below `url`, in order; none if it is missing."""
    filesystem, path = at(url)
    if not filesystem.exists(path):
        return []
    return sorted(filesystem.find(path))


def remove(url: str) -> None:
    """Remove a file or a folder, if it is there."""
    filesystem, path = at(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)
