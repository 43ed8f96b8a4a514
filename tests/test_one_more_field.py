"""A put gets one more field, in a copy of the code: so many modules change until a delivery has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_MODULES = 12

_KEYWORD = ("tag: str | None = None,", "tag: str | None = None, priority: int = 0,")
CHANGES: dict[str, list[tuple[str, str]]] = {
    # What the wire carries: in timeline.fbs, of which `make schema` makes the layout.
    "timeline/wire/generated/layout.py": [
        ("('timeout_ms', 'long', 34, 0),", "('timeout_ms', 'long', 34, 0), ('priority', '[long]', 36, 0),"),
        ("('max_deliveries', 'uint', 38, 0),", "('max_deliveries', 'uint', 38, 0), ('priority', '[long]', 40, 0),"),
    ],
    "timeline/wire/frames.py": [
        # In Produce, then in Deliver.
        ("    timeout_ms: Duration = 0\n", "    priority: Int64 | None = None\n    timeout_ms: Duration = 0\n"),
        ("    max_deliveries: int = 0\n", "    max_deliveries: int = 0\n    priority: Int64 | None = None\n"),
    ],
    # What a store is given, and what it gives back.
    "timeline/storage_plugins/contract.py": [
        ("    payload_bytes: Int64 | None = None\n", "    priority: Int64\n    payload_bytes: Int64 | None = None\n")
    ],
    "timeline/model.py": [("    died_ms: Times\n", "    died_ms: Times\n    priority: Int64\n")],
    # What users say and see.
    "timeline/driver/message.py": [
        _KEYWORD,
        ("self.payload = check_payload(payload)\n", "self.payload, self.priority = check_payload(payload), priority\n"),
        ('"in_", "payload", "tag")', '"in_", "payload", "priority", "tag")'),
    ],
    "timeline/driver/batch.py": [
        (
            "        return batch\n",
            "        batch.priority = np.array([message.priority for message in listed])\n        return batch\n",
        )
    ],
    "timeline/driver/producer.py": [
        _KEYWORD,
        (
            "Message(payload, at, in_, id, tag, ",
            "Message(payload, at, in_, id, tag, priority=priority, headers=headers, expires=expires)  # ",
        ),
        ("payload, expires_ms, tag, headers)", "payload, expires_ms, tag, headers, message.priority)"),
    ],
    "timeline/driver/delivery.py": [
        (
            "    @property\n    def tag(self)",
            "    @property\n    def priority(self):\n        return int(self._frame.columns.priority[self._index])\n\n"
            "    @property\n    def tag(self)",
        )
    ],
}
"""The modules that change until the memory store delivers it, and how. CONTRIBUTING.md names those of other stores, and
what this copy leaves out: the range, and whatever else makes `Puts`."""

JOURNEY = """
import asyncio, timeline
from tests.driver.broker import Broker

async def journey():
    broker = Broker("memory://")
    await broker.start()
    async with timeline.connect(broker.address) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t") as c:
            await p.produce(b"", in_=0, id="one", priority=3)
            await p.produce_many([timeline.Message(b"", in_=0, id=f"many {n}", priority=n) for n in (5, 6)])
            told = {}
            async for delivery in c:
                told[delivery.id] = delivery.priority
                await delivery.ack()
                if len(told) == 3:
                    break
    await broker.stop()
    assert told == {"one": 3, "many 5": 5, "many 6": 6}, told
    print(timeline.__file__)

asyncio.run(journey())
"""


def test_a_field_of_a_put_is_declared_in_few_modules(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "timeline", tmp_path / "timeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "driver", tmp_path / "tests" / "driver", ignore=shutil.ignore_patterns("test_*"))
    for name, edits in CHANGES.items():
        module = tmp_path / name
        source = module.read_text(encoding="utf-8")
        for old, new in edits:
            assert old in source, f"{name} has changed, so that this test must: {old!r}"
            source = source.replace(old, new, 1)
        module.write_text(source, encoding="utf-8")
    travels = subprocess.run(
        [sys.executable, "-c", JOURNEY],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert travels.returncode == 0, travels.stderr
    assert travels.stdout.startswith(str(tmp_path))
    assert len(CHANGES) <= MOST_MODULES
