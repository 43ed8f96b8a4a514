"""Storage plugins: the contract, its conformance suite, and one package per store.

`open_store(url)` finds a plugin by the URL's scheme among the entry points of group `timeline.storage_plugins`. Its
module is imported on first use. If its driver is missing, the error names the extra to install. `payloads=` in a URL's
query names a place for large payloads, for any store (see `offload`).
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast
from urllib.parse import unquote

from timeline.config import parse_bytes
from timeline.errors import Invalid, TimelineError
from timeline.storage_plugins.contract import Store, StoreRefused
from timeline.storage_plugins.offload import OFFLOAD_BYTES
from timeline.wording import install_command

GROUP = "timeline.storage_plugins"

StoreFactory = Callable[[str], Store]
"""An entry point's target. Called with the whole URL, it returns a store that is not open yet. It raises StoreRefused
for a URL that makes no sense."""

SHOWN_CHARS = 160
_NO_PORT = re.compile(r":(?![0-9]+(?:[/,]|$))")
"""A colon before something else than a port, for example before a password."""
_BRACKETED = re.compile(r"\[[^\]]*\]")
_OPTIONS = re.compile(r"[?][a-z_]+=[^&#]*(?:&[a-z_]+=[^&#]*)*")


class PluginRefused(StoreRefused):
    """The URL is right, and its plugin cannot be used: a package is missing, or the plugin is incomplete. `sentences`:
    what is wrong, one each."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(" ".join(sentences))
        self.sentences = sentences


class UrlRefused(StoreRefused, Invalid):
    """A URL that names no store, whatever server there is: a usage error, as every Invalid is."""


def plugins() -> dict[str, EntryPoint]:
    """Return the known schemes and where their plugins are."""
    return _plugins_on(tuple(sys.path))


@cache
def _plugins_on(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the plugins of what is installed on `path`: finding them reads a file of each package there."""
    return {point.name: point for point in entry_points(group=GROUP)}


def make_store(url: str) -> Store:
    """Return the store for `url`, not open yet. Raise UrlRefused for an unknown scheme (naming the nearest known
    one) or a URL that the plugin does not understand. Raise StoreRefused for a missing driver (naming the extra to
    install)."""
    try:
        return _made(url)
    except PluginRefused:
        raise
    except StoreRefused as refused:
        # Nobody was asked yet: it is the URL that is wrong.
        raise UrlRefused(refused.reason) from refused


def _made(url: str) -> Store:
    _check_secrets(url)
    url, place, offload_bytes = offload_of(url)
    store = _make_plain(url)
    if not place:
        return store
    try:
        from timeline.storage_plugins.offload.files import PayloadFiles
        from timeline.storage_plugins.offload.store import OffloadingStore
    except ModuleNotFoundError as missing:
        if missing.name != "fsspec":
            raise
        raise PluginRefused(
            f"payloads= needs fsspec, which is not installed: {install_command('offload')}"
        ) from missing
    return OffloadingStore(store, PayloadFiles(place), offload_bytes)


def _check_secrets(url: str) -> None:
    """Raise StoreRefused for an unencoded `?` or `#` in user or password. The rest of the secret would be taken for
    options, and named in errors."""
    rest = url.partition("://")[2]
    tail = rest[len(_head(rest)) :]
    if "@" in tail and not rest.startswith("/") and not _OPTIONS.fullmatch(tail):
        raise StoreRefused(
            f"{shown(url)!r}: special characters in user or password are percent-encoded in a URL: ? is %3F, # is %23, "
            "@ is %40, / is %2F"
        )


def offload_of(url: str) -> tuple[str, str, int]:
    """Return the URL without `payloads=` and `payload_offload_bytes=`, the place of the first (empty: none), and the
    size of the second. Raise StoreRefused."""
    plain, _, query = url.partition("?")
    kept: list[str] = []
    place, size = "", ""
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name == "payloads":
            place = unquote(value)
            if "://" not in place:
                raise StoreRefused(
                    f"payloads= names a place by URL, file:///folder or s3://bucket/folder, not {place!r:.80}"
                )
        elif name == "payload_offload_bytes":
            size = unquote(value)
        else:
            kept.append(part)
    if size and not place:
        raise StoreRefused("payload_offload_bytes= needs payloads=, the place where larger payloads lie")
    try:
        offload_bytes = parse_bytes(size) if size else OFFLOAD_BYTES
    except Invalid as bad:
        raise StoreRefused(f"payload_offload_bytes: {bad.reason}") from bad
    return "?".join((plain, "&".join(kept))) if kept else plain, place, offload_bytes


def _make_plain(url: str) -> Store:
    scheme, separator, _ = url.partition("://")
    known = plugins()
    if not separator or scheme not in known:
        near = difflib.get_close_matches(scheme.partition(":")[0], known, n=1)
        meant = f"; did you mean {near[0]}://?" if near else "."
        names = ", ".join(f"{name}://" for name in sorted(known))
        raise StoreRefused(
            f"no storage plugin for {shown(url)!r}{meant} Known schemes: {names}. A plugin is known once its package "
            "is installed in this environment"
        )
    try:
        factory = cast(StoreFactory, known[scheme].load())
    except ImportError as missing:
        raise PluginRefused(
            f"{scheme}:// needs a package that is not installed ({missing.name or missing}): {install_command(scheme)}"
        ) from missing
    except (Exception, SystemExit) as broken:  # a stranger's module, imported for the first time
        raise PluginRefused(_broken(scheme, known[scheme].value, "cannot be imported", broken)) from broken
    if inspect.isabstract(factory):
        raise PluginRefused(*_missing(factory))
    try:
        store = factory(url)
    except TimelineError:
        raise
    except (Exception, SystemExit) as broken:
        raise PluginRefused(_broken(scheme, known[scheme].value, "made no store", broken)) from broken
    if not isinstance(store, Store):
        raise PluginRefused(f"the plugin of {scheme}:// ({known[scheme].value}) returned {store!r:.80}, not a Store.")
    return store


def _broken(scheme: str, where: str, what: str, error: BaseException) -> str:
    return f"the plugin of {scheme}:// ({where}) {what}: {type(error).__name__}: {error}. --debug shows where."


def _missing(plugin: StoreFactory) -> list[str]:
    """Return a sentence for each method that a store's class lacks, in the contract's order."""
    lacks: frozenset[str] = getattr(plugin, "__abstractmethods__", frozenset())
    name = getattr(plugin, "__name__", "the plugin")
    sentences = []
    for method in sorted(lacks, key=list(vars(Store)).index):
        does = " ".join((inspect.getdoc(getattr(Store, method)) or "").split()).partition(". ")[0].rstrip(".")
        sentences.append(f"{name} lacks {method!r}, which has to do this: {does}.")
    return sentences


async def open_store(url: str) -> Store:
    """Make and open the store for `url`. A store that cannot be opened is closed again."""
    store = make_store(url)
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store


def shown(url: str) -> str:
    """Return `url` for logs and terminals: short, and without user, password and query, which may be secrets."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    head = _head(rest)
    host = head.rpartition("@")[2]
    if "@" in rest[len(head) :] and (host != head or _NO_PORT.search(head)):
        host = ""  # a "?" or "#" in a password that should have been encoded: what stands before it is secret, too
    text = f"{scheme}{separator}{'…@' if host != head else ''}{host}"
    if host == head and not head.startswith("/") and _NO_PORT.search(_BRACKETED.sub("", head)):
        # A password whose "@" was forgotten, or in a URL without "://".
        text = f"{scheme}://…" if separator else f"{head.partition(':')[0]}:…"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def _head(rest: str) -> str:
    """Return the part of a URL before its options. `rest`: the URL without its scheme."""
    return rest.partition("?")[0].partition("#")[0]


__all__ = [
    "GROUP",
    "PluginRefused",
    "StoreFactory",
    "UrlRefused",
    "make_store",
    "offload_of",
    "open_store",
    "plugins",
    "shown",
]
