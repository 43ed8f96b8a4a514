"""The wire: bytes ↔ frames, verified before use. See `frames.py` for what crosses it."""
