"""The schema's scalar types: their codes in a struct, and what those take."""

from __future__ import annotations

SCALARS = {"ubyte": "B", "bool": "B", "ushort": "H", "uint": "I", "long": "q", "ulong": "Q", "double": "d"}
WIDTHS = {"B": 1, "H": 2, "I": 4, "q": 8, "Q": 8, "d": 8}
