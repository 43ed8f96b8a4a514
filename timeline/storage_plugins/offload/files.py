"""Payloads in any filesystem of fsspec: a folder (`file://`), this process (`memory://`), an object store (`s3://`,
`gs://` …, with the package that fsspec asks for)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from timeline.files import no_filesystem, write_whole
from timeline.storage_plugins.offload import PayloadGone, PayloadsRefused, PayloadStore, PayloadsUnavailable

T = TypeVar("T")
MOST_SYNCED = 65_536
MARK = "timeline-payloads"
"""A file at the top of a place. If it is missing, so is the place: a disk that is not mounted leaves an empty
folder."""
AT_ONCE = 16
DEADLINE_S = 30.0
"""The deadline of a call."""


class PayloadFiles(PayloadStore):
    """Files below `url`. `deadline_s`: how long one call may take."""

    def __init__(self, url: str, deadline_s: float = DEADLINE_S) -> None:
        try:
            # Listings are not cached: other brokers write and delete here too.
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as missing:
            raise PayloadsRefused(no_filesystem(url, missing)) from missing
        self._root = str(root).rstrip("/")
        if "@" in self._root.partition("/")[0]:
            raise PayloadsRefused(
                f"{_scheme(url)}: credentials are not taken from a URL, which is shown and logged: "
                "put them into the environment, as the filesystem's documentation says"
            )
        if not self._root:
            raise PayloadsRefused(
                f"{_scheme(url)} alone is no place: name a folder or a bucket, {_scheme(url)}payloads"
            )
        self._disk = _Disk(Path(self._root)) if isinstance(self._files, LocalFileSystem) else None
        self._deadline_s = deadline_s
        self._mark: bytes | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._room = asyncio.Semaphore(AT_ONCE)
        """A place per thread. Calls wait here, within their deadline, and leave nothing behind."""
        self.durable = not isinstance(self._files, MemoryFileSystem)
        self.described = f"{_scheme(url)}{self._root if self._disk else self._root.lstrip('/')}"

    async def open(self) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="timeline-payloads")
            self._room = asyncio.Semaphore(AT_ONCE)
        try:
            await self._try()
            self._mark = await self._read_mark()
            self.fresh = self._mark is None
        except PayloadsUnavailable as trouble:
            await self.close()
            cause = trouble.__cause__
            if isinstance(cause, (FileNotFoundError, PermissionError, NotADirectoryError)):
                raise PayloadsRefused(
                    f"payloads cannot be written to {self.described}: {cause}. Make it, or give us the right to write"
                ) from cause
            raise
        except BaseException:
            await self.close()
            raise

    async def claim(self, cluster_uid: str) -> None:
        if self._mark is None:
            text = f"Payloads of Timeline. It does not use them without this file.\ncluster {cluster_uid}\n"
            await self.write(MARK, text.encode())
            self._mark = text.encode()

    async def in_place(self) -> bool:
        return self._mark is None or await self._read_mark() == self._mark

    async def close(self) -> None:
        self._mark = None
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def check(self) -> None:
        await self._try()
        await self._check_mark()

    async def _try(self) -> None:
        name = f"check/{secrets.token_hex(8)}"
        await self.write(name, b"timeline")
        await self.delete([name])

    async def _read_mark(self) -> bytes | None:
        try:
            found: bytes = await self._run(lambda: self._files.cat_file(self._path(MARK)))
        except PayloadsUnavailable as trouble:
            if isinstance(trouble.__cause__, FileNotFoundError):
                return None
            raise
        return found

    async def _check_mark(self) -> None:
        """Raise PayloadsUnavailable if this is not the place that was opened."""
        if not await self.in_place():
            raise PayloadsUnavailable(f"{self.described} has lost its file {MARK}, or has another: is it mounted?")

    async def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if self._disk:
            # Files written below a mount point would be hidden once the disk is mounted.
            await self._check_mark()
        await self._run(lambda: self._disk.write(Path(path), data) if self._disk else self._files.pipe_file(path, data))

    async def read(self, name: str) -> bytes:
        path = self._path(name)
        try:
            data: bytes = await self._run(lambda: self._files.cat_file(path))
        except PayloadsUnavailable as trouble:
            if isinstance(trouble.__cause__, FileNotFoundError):
                await self._check_mark()
                raise PayloadGone(name) from trouble
            raise
        return data

    async def delete(self, names: Sequence[str]) -> None:
        def remove(path: str) -> None:
            try:
                self._files.rm_file(path)
                if self._disk:
                    self._disk.prune(Path(path).parent)
            except FileNotFoundError:
                pass  # deleted before, by us or another broker

        await asyncio.gather(*(self._run(remove, self._path(name)) for name in names))

    async def names(self, folder: str) -> list[str]:
        def find() -> list[str]:
            try:
                return [str(path) for path in self._files.find(self._path(folder))]
            except FileNotFoundError:
                return []

        cut = len(self._root) + 1
        return [path[cut:] for path in await self._run(find)]

    async def delete_folder(self, folder: str) -> None:
        def remove() -> None:
            try:
                self._files.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                pass  # nothing was ever written there

        await self._run(remove)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` in a thread. Raise PayloadsUnavailable, with the error as its cause."""
        try:
            async with asyncio.timeout(self._deadline_s):
                done = await asyncio.wrap_future(await self._begun(work, *arguments))
            return done
        except PayloadsUnavailable:
            raise
        except TimeoutError as late:
            raise PayloadsUnavailable(f"{self.described} did not answer within {self._deadline_s:g} s") from late
        except Exception as trouble:  # filesystems raise whatever their libraries do
            raise PayloadsUnavailable(f"{self.described}: {type(trouble).__name__}: {trouble}") from trouble

    async def _begun(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Start `work` in a free thread. One that hangs keeps its place, even if its caller has given up."""
        room, loop = self._room, asyncio.get_running_loop()
        await room.acquire()

        def leave(_: object = None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, with all that waited
                loop.call_soon_threadsafe(room.release)

        if self._threads is None:
            leave()
            raise PayloadsUnavailable(f"{self.described} is closed")
        begun = self._threads.submit(work, *arguments)
        begun.add_done_callback(leave)
        return begun


class _Disk:
    """Files below `root` on this machine's disk, each whole or not there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: set[Path] = set()
        """Folders whose entry in their parent is known to be on the disk."""

    def write(self, path: Path, data: bytes) -> None:
        try:
            self._write(path, data)
        except FileNotFoundError:
            self._write(path, data)  # its folder, empty a moment ago, was pruned meanwhile

    def _write(self, path: Path, data: bytes) -> None:
        folder = path.parent
        write_whole(str(path), data)
        _sync_folder(folder)
        while folder not in self._synced and folder != folder.parent:
            _sync_folder(folder.parent)
            if len(self._synced) >= MOST_SYNCED:
                self._synced.clear()
            self._synced.add(folder)
            folder = folder.parent

    def prune(self, folder: Path) -> None:
        """Remove empty folders, which the pieces of a long id have made."""
        while len(folder.relative_to(self._root).parts) > 2:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or gone already
            self._synced.discard(folder)
            folder = folder.parent


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _scheme(url: str) -> str:
    return f"{url.partition('://')[0]}://"
