"""Files of pipelines that somebody changed, and places that take nothing: a sentence, and nothing half done."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from timeline.errors import Invalid
from timeline.model import TopicSettings
from timeline.pipeline.files import read_json, write_bytes, write_json
from timeline.pipeline.jobs.backup import Chunk, Manifest, chunk_of, read_manifest


@pytest.mark.parametrize(
    "changed",
    [
        {"chunks": None},
        {"chunks": [{}]},
        {"chunks": [asdict(Chunk(0, 0, 8)) | {"number": "0"}]},
        {"chunks": [asdict(Chunk(0, 0, 8)) | {"more": 1}]},
        {"settings": None},
        {"settings": {"buckets": "many"}},
        {"settings": {"cron": 1}},
        {"topic": ...},
    ],
)
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    manifest = Manifest("orders", "7", asdict(TopicSettings()), 1)
    manifest.chunks.append(Chunk(0, 0, 64))
    manifest.complete = True
    told = manifest.as_json()
    write_json(f"{tmp_path}/manifest.json", told)
    assert read_manifest(str(tmp_path)) == manifest
    told |= {name: value for name, value in changed.items() if value is not ...}
    for name in [name for name, value in changed.items() if value is ...]:
        del told[name]
    (tmp_path / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(Invalid, match="was changed or is damaged"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "\0", "[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(Invalid, match=r"manifest\.json is no JSON"):
        read_manifest(str(tmp_path))
    with pytest.raises(Invalid, match="tells of no chunk"):
        chunk_of([], "chunks/0000.json")


def test_a_place_that_there_is_not_is_refused() -> None:
    with pytest.raises(Invalid, match=r"'nowhere://x/manifest\.json' is no place for files"):
        read_json("nowhere://x/manifest.json")


def test_credentials_in_a_place_are_refused_and_not_repeated() -> None:
    for scheme, said in (("s3", "credentials are not taken from a URL"), ("s4", "is no place for files")):
        with pytest.raises(Invalid, match=said) as refused:
            read_json(f"{scheme}://key:hunter2@bucket/manifest.json")
        assert "hunter2" not in str(refused.value)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(f"{tmp_path}/a", b"x")
    assert list(tmp_path.iterdir()) == []
