"""Storage plugins: the contract, its conformance suite, and one package per store.

`open_store(url)` finds a plugin by the URL's scheme among the entry points of group `timeline.storage_plugins`. Its
module is imported on first use. If its driver is missing, the error names the extra to install. `payloads=` in a URL's
query names a place for large payloads, for any store (see `offload`).
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
