"""Storage plugins: the contract, its conformance suite, and one package a store.

`open_store(url)` finds a plugin by the URL's scheme among the entry points of group `timeline.storage_plugins`; the
module is imported on first use, and a driver that is missing names the extra to install. `payloads=` in a URL's query
says where large payloads lie apart, for any store (see `offload`).
"""

from timeline.storage_plugins.registry import (
    GROUP,
    PluginRefused,
    StoreFactory,
    UrlRefused,
    make_store,
    offload_of,
    open_store,
    plugins,
    shown,
)

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
