"""Messages and batches: what is wrong is said where it was written."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from timeline import Batch, Invalid, Message, TooLarge
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.driver.message import Ids, asked_time
from timeline.model import Status
from timeline.wire.frames import PutFlag

WHEN = 1_900_000_000_000


@pytest.mark.parametrize("count", [1, 63, 64, 65, 3_000])
def test_ids_are_uuids_in_order_however_many_are_made_at_once(count: int) -> None:
    clock = Clock()
    one, other = Ids(clock, random.Random(7)), Ids(clock, random.Random(7))
    clock.now_ms = lambda: WHEN  # type: ignore[method-assign]
    for _ in range(3):
        made = one.make_column(count).tolist()
        assert made == other.make_many(count) == sorted(made)
        assert len(set(made)) == count
        assert all(
            uuid.UUID(id.decode()).version == 7 and uuid.UUID(id.decode()).variant == uuid.RFC_4122 for id in made
        )


@pytest.mark.parametrize(
    ("arguments", "mends"),
    [
        ({"payload": "text"}, r"\.encode\(\)"),
        ({"payload": 5}, "must be bytes"),
        ({"payload": None}, "must be bytes"),
        ({"at": None}, "either at="),
        ({"in_": 5}, "either at="),
        ({"id": ""}, "1 to 255 bytes"),
        ({"id": "x" * 256}, "1 to 255 bytes"),
        ({"id": "ü" * 128}, "1 to 255 bytes"),
        ({"id": "a\0b"}, "without NUL"),
        ({"id": b"bytes"}, "text"),
        ({"id": "\ud800"}, "surrogate"),
        ({"tag": "x" * 65}, "64 bytes"),
        ({"tag": 5}, "text"),
        ({"headers": {"a": 1}}, "strings"),
        ({"headers": [("a", "b")]}, "mapping"),
        ({"expires": WHEN}, "after the due"),
        ({"expires": 5}, "looks like seconds.*give a text like '15m'"),
        ({"expires": object()}, "from now give a text like '15m'$"),
        ({"tag": np.zeros((2, 2))}, "a tag is text"),
        ({"headers": np.zeros((2, 2))}, "mapping"),
    ],
)
def test_a_message_that_cannot_be_put_is_refused(arguments: dict[str, object], mends: str) -> None:
    given: dict[str, object] = {"payload": b"", "at": WHEN, **arguments}
    with pytest.raises(Invalid, match=mends):
        Message(**given)  # type: ignore[arg-type]


def test_too_large_is_said_before_anything_is_sent() -> None:
    with pytest.raises(TooLarge, match="8192"):
        Message(b"", at=WHEN, headers={"k": "v" * 8_200})
    with pytest.raises(TooLarge):
        Message(bytes(64 * 1024 * 1024 + 1), at=WHEN)


def test_limits_are_inclusive() -> None:
    Message(memoryview(b"x"), at=WHEN, id="x" * 255, tag="y" * 64, headers={"k": "v" * 8_187}, expires=WHEN + 1)


def test_a_batch_takes_columns_of_many_shapes() -> None:
    same = [b"a", b"", b"ccc"]
    for payloads in (
        same,
        Ragged.of(same),
        [bytearray(b"a"), b"", memoryview(b"ccc")],
        np.array(same, dtype=object),
        pa.array(same, pa.binary()),
        pa.array([b"-", *same, b"-"], pa.large_binary())[1:4],
        pa.chunked_array([pa.array(same[:1]), pa.array(same[1:])]),
        (item for item in same),
    ):
        batch = Batch(payloads, at=WHEN)
        assert batch.payloads.tolist() == same and len(batch) == 3
        assert batch.time_ms.tolist() == [WHEN] * 3 and not batch.flags.any()
    for none in ([], pa.array([], pa.binary()), pa.chunked_array([], pa.binary()), np.array([], dtype="V1")):
        assert len(Batch(none, at=WHEN)) == len(Batch(none, in_=[], ids=none)) == 0


ENDS_IN_NUL = [b"ab\0\0", b"\0\0\0\0"]


@pytest.mark.parametrize(
    "payloads",
    [
        np.array(ENDS_IN_NUL, dtype=object),
        np.array(ENDS_IN_NUL, dtype="V4"),
        pa.array(ENDS_IN_NUL, pa.large_binary()),
        pa.array(ENDS_IN_NUL, pa.binary(4)).cast("binary"),
        [memoryview(one).cast("I") for one in ENDS_IN_NUL],
        [memoryview(one + one).cast("B", (2, 4))[0:1] for one in ENDS_IN_NUL],
        [memoryview(bytes(byte for each in one for byte in (each, 1)))[::2] for one in ENDS_IN_NUL],
    ],
)
def test_nuls_at_the_end_of_a_payload_are_kept(payloads: Any) -> None:
    assert Batch(payloads, at=WHEN).payloads.tolist() == ENDS_IN_NUL


def test_numpy_s_bytes_are_refused_as_payloads_since_it_drops_nuls() -> None:
    trimmed = np.array(ENDS_IN_NUL)
    for column in (trimmed, trimmed[:0], np.ma.array(trimmed)):
        with pytest.raises(Invalid, match=r"payloads must not be .* dtype S .*list of bytes, an array of dtype object"):
            Batch(column, at=WHEN)
    # Nobody could refuse what a reader might try next.
    assert trimmed.astype(object).tolist() == trimmed.tolist() != ENDS_IN_NUL
    with pytest.raises(Invalid, match=r"from the original values, because astype\(\) and tolist\(\) drop the NULs"):
        Batch(trimmed, at=WHEN)
    with pytest.raises(Invalid, match="as they were before they became an item"):
        Message(trimmed[0], at=WHEN)
    for items in (list(trimmed), [b"", trimmed[0]]):
        refused = Batch(items, at=WHEN).refused
        assert re.search(r"payloads\[\d\]: .*bytes_.*array of dtype object", refused[max(refused)][1])
    with pytest.raises(Invalid, match="bytes_"):
        Message(trimmed[0], at=WHEN)


def test_ids_and_tags_hold_no_nul_and_may_be_arrays_of_any_text() -> None:
    for kind in ("S4", "U4", object):
        texts = np.array(["ab", "ü"] if kind != "S4" else [b"ab", "ü".encode()], dtype=kind)
        batch = Batch([b"", b""], at=WHEN, ids=texts, tags=texts)
        assert batch.ids is not None and batch.ids.tolist() == [b"ab", "ü".encode()]
        assert batch.tags is not None and batch.tags.tolist() == batch.ids.tolist()
    assert "without NUL" in Batch([b""], at=WHEN, ids=np.array(["a\0"], dtype=object)).refused[0][1]
    assert "mapping" in Batch([b""], at=WHEN, headers=np.array([b"k"])).refused[0][1]  # type: ignore[arg-type]


def test_times_of_a_batch() -> None:
    aware = datetime.fromtimestamp(WHEN / 1000, UTC)
    for at in (
        [WHEN, aware],
        np.array([WHEN, WHEN]),
        pa.array([WHEN, WHEN]),
        pa.array([WHEN, WHEN], pa.timestamp("ms", "UTC")),
        pa.array([WHEN * 1000, WHEN * 1000 - 999], pa.timestamp("us", "UTC")),
    ):
        assert Batch([b"", b""], at=at).time_ms.tolist() == [WHEN, WHEN]
    for expires in (np.array([WHEN, WHEN + 1]), pa.array([WHEN, WHEN + 1]), [WHEN, WHEN + 1]):
        assert Batch([b"", b""], in_=0, expires=expires).expires_ms.tolist() == [WHEN, WHEN + 1]  # type: ignore[union-attr]
    batch = Batch([b"", b""], in_=["1s", 2], expires=["1h", WHEN])
    assert batch.time_ms.tolist() == [1_000, 2_000]
    assert batch.flags.tolist() == [PutFlag.IN | PutFlag.EXPIRES_IN, PutFlag.IN]
    assert Batch([b"", b""], in_=np.array([0.5, 1.0])).time_ms.tolist() == [500, 1_000]
    # Seconds that 32 bits hold exactly; their microseconds they do not.
    assert Batch([b""], in_=np.array([10_000_019], np.float32)).time_ms.tolist() == [10_000_019_000]
    assert Batch([b""], in_=np.array([3], np.float16)).time_ms.tolist() == [3_000]
    past = pa.array([2**20, 1], pa.timestamp("ns", "UTC"))
    assert Batch([b"", b""], at=past).time_ms.tolist() == [2, 1]
    chunks = pa.chunked_array([[WHEN], [WHEN]], pa.int64())
    assert Batch([b"", b""], at=chunks).time_ms.tolist() == [WHEN, WHEN]


def test_an_object_batch_is_the_same_as_columns() -> None:
    batch = Batch.of([Message(b"a", at=WHEN, id="x", tag="t"), Message(b"b", in_="1s", headers={"k": "v"})])
    assert batch.ids is not None and batch.ids.tolist() == [b"x", b""]
    assert batch.tags is not None and batch.tags.tolist() == [b"t", b""]
    assert batch.time_ms.tolist() == [WHEN, 1_000] and batch.flags.tolist() == [0, PutFlag.IN]
    assert batch.expires_ms is None
    assert len(Batch.of([])) == 0


@pytest.mark.parametrize(
    ("arguments", "mends"),
    [
        ({"payloads": b"one"}, "column"),
        ({"payloads": pa.array([1, 2])}, "binary or string, not int64"),
        ({"payloads": pa.array([b"ab", b"cd"], pa.binary(2))}, r"not fixed_size_binary\[2\]: array.cast\('binary'\)"),
        ({"payloads": pa.array([b"ab", b"cd"]).dictionary_encode()}, r"not dictionary<.*array.cast\('binary'\)"),
        ({"payloads": np.array([1, 2])}, "bytes"),
        ({"at": [WHEN]}, "1 items for 2"),
        ({"at": np.array([1.5, 2.5])}, "integer milliseconds"),
        ({"at": pa.array([WHEN, WHEN], pa.timestamp("ms"))}, "time zone"),
        ({"at": pa.array([WHEN // 1000] * 2, pa.int64()).cast(pa.decimal128(38, 0))}, "Arrow array of timestamps"),
        ({"at": pa.array([20_000] * 2, pa.date32())}, "Arrow array of timestamps"),
        ({"at": pa.array(["x", "y"])}, "Arrow array of timestamps"),
        ({"at": pa.array([True, True])}, "Arrow array of timestamps"),
        ({"at": np.full((2, 2), WHEN)}, "at must be one-dimensional"),
        ({"expires": np.full((2, 1), WHEN)}, "expires must be one-dimensional"),
        ({"at": None, "in_": np.full((2, 2), 1.0)}, "in_ must be one-dimensional"),
        ({"tags": 5}, "tags must be texts"),
        ({"ids": 5}, "ids must be texts"),
        ({"headers": 5}, "headers must be one mapping for all"),
        ({"headers": (one for one in ())}, "headers must be one mapping for all"),
        ({"at": None}, "either at="),
        ({"ids": "m"}, "one id each"),
        ({"ids": ["a"]}, "1 items for 2 messages: one each$"),
        ({"headers": [{"a": "b"}]}, "1 items for 2"),
        ({"expires": ["1h"]}, "1 items for 2 messages: one each, or one for all$"),
        ({"expires": np.array([WHEN])}, "1 items for 2"),
        ({"expires": np.array([1.5, 2.5])}, "expires must be an array of integer milliseconds"),
    ],
)
def test_a_batch_that_cannot_be_put_is_refused(arguments: dict[str, object], mends: str) -> None:
    given: dict[str, object] = {"payloads": [b"a", b"b"], "at": WHEN, **arguments}
    with pytest.raises(Invalid, match=mends):
        Batch(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "mends"),
    [
        ({"payloads": [b"a", "b"]}, r"payloads\[1\].*encode"),
        ({"payloads": pa.array([b"a", None])}, "null"),
        ({"at": [WHEN, 5]}, r"at\[1\].*seconds"),
        ({"at": np.array([WHEN, 5])}, r"at\[1\].*seconds"),
        ({"at": np.array([WHEN, 0])}, r"at\[1\].*above 0, not 0"),
        ({"at": np.array([WHEN, -5])}, r"at\[1\].*above 0, not -5"),
        ({"at": [WHEN, datetime(1969, 7, 20, tzinfo=UTC)]}, r"at\[1\].*after the start of 1970"),
        ({"at": pa.array([WHEN, 0], pa.timestamp("ms", "UTC"))}, r"at\[1\].*after the start of 1970, not 0 ms"),
        ({"expires": pa.array([WHEN, -1], pa.timestamp("us", "UTC"))}, r"expires\[1\].*after the start of 1970"),
        # In milliseconds 64 bits do not hold these: they would wrap to the start of 1970, and to some other year.
        ({"at": pa.array([WHEN // 1000, 2**62], pa.timestamp("s", "UTC"))}, r"at\[1\].*year 9999"),
        ({"at": pa.array([18_446_745_869_176_929] * 2, pa.timestamp("s", "UTC"))}, r"at\[0\].*year 9999"),
        ({"at": [datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))] * 2}, r"at\[0\].*year 9999"),
        ({"at": pa.array([253_402_300_799_999_001] * 2, pa.timestamp("us", "UTC"))}, r"at\[0\].*year 9999"),
        ({"at": pa.array([WHEN, None])}, "null"),
        # Below a mask lies what numpy fills in, 999999, or what was there before.
        ({"at": np.ma.array([WHEN, WHEN], mask=[0, 1])}, r"at\[1\] is null: each message has one$"),
        ({"expires": np.ma.array([WHEN, WHEN], mask=[0, 1])}, r"expires\[1\] is null"),
        ({"at": None, "in_": np.ma.array([1.0, 2.0], mask=[1, 1])}, r"in_\[0\] is null"),
        ({"at": np.array([WHEN, None])}, r"at\[1\]: at must be .* not None"),
        ({"at": None, "in_": np.array(["1s", None])}, r"in_\[1\]: in_ must be"),
        ({"ids": pa.array(["a", None])}, r"ids\[1\] is null: each message has one$"),
        ({"ids": ["a", ""]}, r"ids\[1\]"),
        ({"ids": [b"a", b"\xff"]}, r"ids\[1\].* must be UTF-8$"),
        ({"ids": ["a", b"\xff"]}, r"ids\[1\].* must be UTF-8, not b'\\xff'"),
        ({"ids": np.array([b"a", b"\xff"])}, r"ids\[1\].* must be UTF-8, not b'\\xff'"),
        ({"tags": [b"a", b"\xff"]}, r"tags\[1\].* must be UTF-8, not b'\\xff'"),
        ({"ids": Ragged.of([b"a", b"\xff"])}, "UTF-8"),
        ({"ids": Ragged.of([b"a", b"x\0"])}, r"ids\[1\].*NUL"),
        ({"tags": ["x" * 65, ""]}, "64 bytes"),
        ({"expires": ["1h", "0s"]}, r"expires\[1\]: expires must be at least"),
        ({"expires": np.array([WHEN, 5])}, r"expires\[1\]: expires=5 looks like seconds"),
    ],
)
def test_a_message_of_a_batch_that_cannot_be_put_is_refused_alone(arguments: dict[str, object], mends: str) -> None:
    given: dict[str, object] = {"payloads": [b"a", b"b"], "at": WHEN, **arguments}
    batch = Batch(**given)  # type: ignore[arg-type]
    status, why = batch.refused[min(batch.refused)]
    assert status is Status.INVALID and re.search(mends, why), why
    assert len(batch) == len(batch.time_ms) == 2


class _Series:
    """As a column of a data frame: it iterates, and has `to_numpy`, without being Arrow's."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def to_numpy(self) -> object:
        return np.array(self._values, dtype=object)


def test_texts_may_be_a_column_of_a_data_frame() -> None:
    batch = Batch([b"a", b"b"], at=WHEN, ids=_Series(["x", "y"]), tags=_Series(["s", "t"]))
    assert batch.ids is not None and batch.ids.tolist() == [b"x", b"y"]
    assert batch.tags is not None and batch.tags.tolist() == [b"s", b"t"]


def test_times_may_be_a_column_of_a_data_frame() -> None:
    class Series(_Series):
        def __len__(self) -> int:
            return len(self._values)

    aware = datetime.fromtimestamp(WHEN / 1000, UTC)
    for at in ([WHEN, aware], [aware, aware], [WHEN, WHEN]):
        assert Batch([b"a", b"b"], at=Series(at)).time_ms.tolist() == [WHEN, WHEN]
    assert Batch([b"a", b"b"], in_=Series([timedelta(seconds=1), "2s"])).time_ms.tolist() == [1_000, 2_000]
    batch = Batch([b"a", b"b"], in_=0, expires=Series([None, aware]))
    assert batch.expires_ms is not None and batch.expires_ms.tolist() == [0, WHEN]


def test_a_masked_array_without_a_masked_item_is_an_array() -> None:
    batch = Batch([b"a", b"b"], at=np.ma.array([WHEN, WHEN], mask=[0, 0]))
    assert type(batch.time_ms) is np.ndarray and batch.time_ms.tolist() == [WHEN, WHEN]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
def test_a_null_tag_is_none(kind: pa.DataType) -> None:
    array = pa.array(["-", "x", None, "y"], pa.string()).cast(kind)
    for tags in (array[1:3], pa.chunked_array([array[1:2], array[2:3]])):
        batch = Batch([b"a", b"b"], at=WHEN, tags=tags)
        assert batch.tags is not None and batch.tags.tolist() == [b"x", b""]


@pytest.mark.parametrize("births", [[1, 2**64 - 1], (1, 2**64 - 1), np.array([1, 2**64 - 1], np.uint64)])
def test_births_may_be_an_array_or_a_list(births: Any) -> None:
    batch = Batch([b"a", b"b"], at=WHEN)
    assert batch.births is None
    batch.births = births
    assert batch.births is not None and batch.births.dtype == np.uint64 and batch.births.tolist() == [1, 2**64 - 1]
    batch.births = None
    assert batch.births is None


@pytest.mark.parametrize(
    "births",
    [
        *("x", "xx", 5, [1], [1, 2, 3], [1, 0], [1, -1], [1, 2**64], [1.5, 2.0], ["a", "b"], {1, 2}),
        *(np.array([1]), np.array([0, 1]), np.array([1, -1]), np.array([1.0, 2.0]), np.array([[1, 2]])),
        np.ma.array([1, 2], mask=[0, 1]),
    ],
)
def test_births_that_cannot_be_are_refused_where_they_are_set(births: Any) -> None:
    batch = Batch([b"a", b"b"], at=WHEN)
    with pytest.raises(Invalid, match="births"):
        batch.births = births
    assert batch.births is None


def test_headers_may_be_a_column_of_a_data_frame() -> None:
    class Series(_Series):
        def __len__(self) -> int:
            return 2

    batch = Batch([b"a", b"b"], at=WHEN, headers=Series([{"k": "v"}, None]))  # type: ignore[arg-type]
    assert batch.headers is not None and batch.headers[1] == b"" != batch.headers[0]


@pytest.mark.parametrize("many", [Message(b"", in_=0), None, 5])
def test_what_is_no_column_of_messages_is_refused(many: object) -> None:
    with pytest.raises(Invalid, match=r"a Batch or an iterable of timeline\.Message, not"):
        Batch.of(many)  # type: ignore[arg-type]


def test_at_or_in_but_not_both() -> None:
    assert asked_time(None, "1s") == (1_000, True)
    for both in ((None, None), (WHEN, "1s")):
        with pytest.raises(Invalid):
            asked_time(*both)
