"""The schema, the code made from it and Python's own nouns say the same."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from timeline import model
from timeline.broker.server.calls import STATUS_OF
from timeline.wire import frames
from timeline.wire.generated import layout

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = (ROOT / "schemas" / "fbs" / "timeline.fbs").read_text(encoding="utf-8")
GENERATED = ("timeline/wire/generated", "tests/wire/generated")


@pytest.mark.slow
def test_generated_code_is_current(require_service: Callable[[str], None], tmp_path: Path) -> None:
    require_service("flatc")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "schema.sh", tmp_path], check=True, env=environment)
    made, committed = ({name: _sources(root, name) for name in GENERATED} for root in (tmp_path, ROOT))
    assert [sorted(sources) for sources in made.values()] == [
        ["__init__.py", "layout.py"],
        ["__init__.py", "accessors.py"],
    ]
    assert made == committed, "run `make schema`"


def _sources(root: Path, folder: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (root / folder).glob("*.py")}


def test_every_frame_is_a_body_and_every_body_a_frame() -> None:
    assert {kind.__name__ for kind in typing.get_args(frames.Frame)} == set(layout.BODIES.values())
    assert list(layout.BODIES) == list(range(1, len(layout.BODIES) + 1))


def test_methods_and_names_are_those_of_the_schema() -> None:
    assert layout.METHODS == frames.METHODS
    assert layout.SERVICE == frames.SERVICE
    assert layout.IDENTIFIER == b"TLN1"
    assert f"This is version {frames.MAJOR}.{frames.MINOR};" in SCHEMA


NUMBERED = {
    "Operation": model.Operation,
    "PutFlag": frames.PutFlag,
    "SettleFlag": frames.SettleFlag,
    "MutateFlag": frames.MutateFlag,
    "LeavingReason": model.LeavingReason,
    "TopicAction": frames.TopicAction,
    "ScheduleAction": frames.ScheduleAction,
    "Cause": model.LateCause,
}


@pytest.mark.parametrize("name", NUMBERED)
def test_enums_are_numbered_as_in_the_schema(name: str) -> None:
    assert layout.ENUMS[name] == {member.name: int(member) for member in NUMBERED[name]}


def test_statuses_and_states_are_numbered_as_in_the_schema() -> None:
    assert layout.ENUMS["Status"] == {status.name: status.code for status in model.Status}
    assert layout.ENUMS["State"] == {state.name: number for number, state in enumerate(model.State)}
    precedence = ", ".join(model.PRECEDENCE)
    assert precedence in " ".join(SCHEMA.replace("///", "").split())


ELSEWHERE = {
    "Answers": {"settled", "late", "repeat", "commit_seq", "displaced"},
    "TagMutated": {"counts"},
    "TopicList": {"topics"},
}
"""Fields of the dataclasses that the schema has under other names, or that are between a broker and its store alone."""


def test_every_field_is_in_the_schema() -> None:
    for kind in (*typing.get_args(frames.Frame), model.Answers, model.Rows):
        fields = {field.name for field in dataclasses.fields(kind)} - ELSEWHERE.get(kind.__name__, set())
        assert fields <= {name for name, *_ in layout.TABLES[kind.__name__]}, kind.__name__


def test_every_setting_is_a_column_of_the_topic_list() -> None:
    columns = {name for name, *_ in layout.TABLES["TopicList"]}
    assert {field.name for field in dataclasses.fields(model.TopicSettings)} <= columns


def test_the_schema_needs_no_recursion_and_no_vector_of_tables() -> None:
    scalars = ["ubyte", "bool", "ushort", "uint", "long", "ulong", "double", "string", "union"]
    plain = set(scalars) | {f"[{scalar}]" for scalar in ("ubyte", "uint", "long", "ulong")}
    for fields in layout.TABLES.values():
        for _, kind, _, _ in fields:
            assert kind in plain or all(inner in plain for _, inner, _, _ in layout.TABLES[kind])


def test_defaults_are_those_of_the_frames() -> None:
    defaults = {
        (table, name): value for table, fields in layout.TABLES.items() for name, _, _, value in fields if value
    }
    assert defaults.pop(("Leaving", "reason")) == model.LeavingReason.DRAINING
    for (table, name), value in defaults.items():
        (field,) = (field for field in dataclasses.fields(getattr(frames, table)) if field.name == name)
        assert field.default == value


def test_bucket_examples_of_the_schema_hold() -> None:
    lines = re.findall(r'///   (".*?"|(?:[0-9A-F]{2} )+) .*?(\d+) +(\d+) +(\d+)', SCHEMA)
    assert len(lines) == 5
    for written, crc, small, large in lines:
        id = written.strip('"').encode() if '"' in written else bytes.fromhex(written)
        assert model.payload_sum(id) == int(crc)
        assert (model.bucket_of(id, 64), model.bucket_of(id, 4096)) == (int(small), int(large))


def test_the_header_example_of_the_schema_holds() -> None:
    (example,) = re.findall(r'\{"a": "1", "b": ""\}  is  ([0-9a-f ]+)', SCHEMA)
    assert model.encode_headers({"b": "", "a": "1"}) == bytes.fromhex(example)


@pytest.mark.parametrize(
    "said",
    [
        f"0..{model.MAX_TIME_MS} ",
        f"0..{model.MAX_DURATION_MS} ",
        f"{model.MAX_BATCH:,} messages",
        f"tag: up to {model.MAX_TAG_BYTES} bytes",
        f"id: 1..{model.MAX_ID_BYTES} bytes",
        "64 MiB + 256 KiB",
    ],
)
def test_limits_in_the_schema_are_the_models(said: str) -> None:
    assert said in SCHEMA
    assert frames.MAX_FRAME_BYTES == (64 * 1024 + 256) * 1024
    assert frames.MAX_COUNT == 2**53 - 1


def test_the_schema_says_what_each_grpc_status_means_that_a_broker_ends_calls_with() -> None:
    section = SCHEMA.partition("/// HOW A CALL ENDS.")[2].partition("/// STREAMS.")[0]
    for fault, status in STATUS_OF.items():
        assert re.search(rf"^///   ([A-Z_,: ]*\b)?{status.name}\b", section, re.MULTILINE) or (
            f", {status.name}" in section
        ), fault
    assert re.search(r"^///   UNIMPLEMENTED\b", section, re.MULTILINE)
