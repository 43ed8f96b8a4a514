"""Large payloads elsewhere, for any store: `store.py` is a store around another one, `payloads.py` the contract of a
place for payloads, `files.py` such a place in any file system that fsspec knows."""
