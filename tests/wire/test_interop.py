"""Other encoders and decoders of the schema understand us, and we them: flatc itself, and the accessors it generates
on FlatBuffers' own runtime."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import flatbuffers
import numpy as np
import pytest

from tests.wire.generated import accessors
from tests.wire.sameness import same
from tests.wire.samples import SAMPLES, full_produce
from timeline.wire import MAJOR, MINOR, Frame, Produce, decode, decode_as, encode
from timeline.wire.generated import layout

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "fbs" / "timeline.fbs"
GOLDEN = sorted(Path(__file__).parent.glob("golden_1_*.txt"), key=lambda file: int(file.stem.rpartition("_")[2]))
"""Each has what its minor added, in the order of `SAMPLES`."""


def test_flatc_reads_what_we_write_and_writes_what_we_read(
    require_service: Callable[[str], None], tmp_path: Path
) -> None:
    require_service("flatc")
    for index, frame in enumerate(SAMPLES):
        (tmp_path / f"{index}.bin").write_bytes(encode(frame))
    binaries = [f"{index}.bin" for index in range(len(SAMPLES))]
    texts = [f"{index}.json" for index in range(len(SAMPLES))]
    flatc = ["flatc", "--strict-json", "--raw-binary"]
    subprocess.run([*flatc, "--json", SCHEMA, "--", *binaries], cwd=tmp_path, check=True)
    for name in binaries:
        (tmp_path / name).unlink()
    subprocess.run([*flatc, "--binary", SCHEMA, *texts], cwd=tmp_path, check=True)
    for index, frame in enumerate(SAMPLES):
        made = tmp_path / f"{index}.tln"
        assert same(decode(made.read_bytes()), frame), frame


@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_generated_accessors_find_our_body(frame: Frame) -> None:
    data = encode(frame)
    assert accessors.Frame.FrameBufferHasIdentifier(data, 0)
    root = accessors.Frame.GetRootAs(data)
    assert (root.Major(), root.Minor()) == (MAJOR, MINOR)
    assert layout.BODIES[root.BodyType()] == type(frame).__name__


def test_generated_accessors_read_our_columns() -> None:
    frame = full_produce()
    root = accessors.Frame.GetRootAs(encode(frame))
    read = accessors.Produce()
    read.Init(root.Body().Bytes, root.Body().Pos)
    assert read.Topic() == b"departures"
    assert read.Request() == 7
    assert read.BirthAsNumpy().tolist() == [1, 2, 3]
    assert read.TimeMsAsNumpy().tolist() == frame.time_ms.tolist()
    assert read.IdsOffsetsAsNumpy().tolist() == [0, 6, 12, 18]
    assert read.IdsAsNumpy().tobytes() == b"".join(frame.ids.tolist())
    assert read.HeadersAsNumpy().tobytes() == b"".join(frame.headers.tolist() if frame.headers else [])
    assert read.TimeoutMs() == 5_000


def test_a_frame_by_flatbuffers_own_builder_is_read() -> None:
    builder = flatbuffers.Builder(0)
    payloads = builder.CreateByteVector(b"onetwo")
    payload_offsets = builder.CreateNumpyVector(np.array([0, 3, 6], np.uint32))
    flags = builder.CreateNumpyVector(np.zeros(2, np.uint8))
    time_ms = builder.CreateNumpyVector(np.array([5, 6], np.int64))
    birth = builder.CreateNumpyVector(np.array([1, 2], np.uint64))
    ids = builder.CreateByteVector(b"ab")
    id_offsets = builder.CreateNumpyVector(np.array([0, 1, 2], np.uint32))
    name = builder.CreateSharedString("both")
    accessors.ProduceStart(builder)
    accessors.ProduceAddTopic(builder, name)
    accessors.ProduceAddGroup(builder, name)
    accessors.ProduceAddIdsOffsets(builder, id_offsets)
    accessors.ProduceAddIds(builder, ids)
    accessors.ProduceAddBirth(builder, birth)
    accessors.ProduceAddTimeMs(builder, time_ms)
    accessors.ProduceAddFlags(builder, flags)
    accessors.ProduceAddPayloadsOffsets(builder, payload_offsets)
    accessors.ProduceAddPayloads(builder, payloads)
    body = accessors.ProduceEnd(builder)
    accessors.FrameStart(builder)
    accessors.FrameAddMajor(builder, 1)
    accessors.FrameAddBodyType(builder, accessors.Body.Produce)
    accessors.FrameAddBody(builder, body)
    builder.Finish(accessors.FrameEnd(builder), b"TLN1")
    read = decode_as(bytes(builder.Output()), Produce)
    assert (read.request, read.topic, read.group, read.timeout_ms) == (0, "both", "both", 0)
    assert read.ids.tolist() == [b"a", b"b"]
    assert read.payloads.tolist() == [b"one", b"two"]
    assert read.time_ms.tolist() == [5, 6]
    assert read.headers is None


RENAMED = {"Stand": "StatusRequest", "Standing": "BrokerStatus"}
"""Names of frames when they were recorded; their numbers stay."""


def test_frames_of_earlier_versions_stay_readable() -> None:
    """Recorded bytes, whatever today's encoder makes of the same frames."""
    recorded = [line.split() for golden in GOLDEN for line in golden.read_text(encoding="ascii").splitlines()]
    assert len(recorded) == len(SAMPLES)
    for (name, data), frame in zip(recorded, SAMPLES, strict=True):
        assert RENAMED.get(name, name) == type(frame).__name__
        assert same(decode(bytes.fromhex(data)), frame)
