"""Storage plugins: the contract, its conformance suite, and one module a store.

`open_store(url)` finds a plugin by the URL's scheme among the entry points of group `timeline.storage_plugins`; the
module is imported on first use, and a driver that is missing names the extra to install.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from timeline.storage_plugins.contract import Store, StoreRefused

GROUP = "timeline.storage_plugins"

StoreFactory = Callable[[str], Store]
"""What an entry point names: called with the whole URL, it returns a store that is not open yet, or raises
StoreRefused when the URL makes no sense."""

SHOWN_CHARS = 160


def plugins() -> dict[str, EntryPoint]:
    """The known schemes and where their plugins are."""
    return {point.name: point for point in entry_points(group=GROUP)}


def make_store(url: str) -> Store:
    """The store for `url`, not open yet. Raises StoreRefused: unknown scheme (with the nearest known one), missing
    driver (with the extra to install), or a URL the plugin does not understand."""
    scheme, separator, _ = url.partition("://")
    known = plugins()
    if not separator or scheme not in known:
        near = difflib.get_close_matches(scheme, known, n=1)
        meant = f"; did you mean {near[0]}://?" if near else "."
        names = ", ".join(f"{name}://" for name in sorted(known))
        raise StoreRefused(f"no storage plugin for {shown(url)!r}{meant} Known schemes: {names}")
    try:
        factory = cast(StoreFactory, known[scheme].load())
    except ImportError as missing:
        raise StoreRefused(
            f"{scheme}:// needs a package that is not installed ({missing.name or missing}): "
            f"pip install 'timeline[{scheme}]'"
        ) from missing
    return factory(url)


async def open_store(url: str) -> Store:
    """`make_store` and `Store.open` in one. A store that cannot be opened is closed again."""
    store = make_store(url)
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store


def shown(url: str) -> str:
    """`url` as it may be printed and logged: without user, password and query, in which secrets travel, and short."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    rest = rest.partition("?")[0].partition("#")[0]
    host = rest.rpartition("@")[2]
    text = f"{scheme}{separator}{'…@' if host != rest else ''}{host}"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
