"""Putting messages: one, many, and streams of any length in bounded memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from timeline.driver.batch import Batch
from timeline.driver.message import Message, move_flag
from timeline.driver.receipts import Receipt, Receipts
from timeline.driver.times import iso_or_none
from timeline.errors import FIXED_LIMIT, Exists, Invalid, TimelineError, TooLarge
from timeline.gateway.clients import CallerClient
from timeline.gateway.keys import RepeatKey
from timeline.gateway.problems import sentence
from timeline.gateway.requests import MAX_BODY_BYTES, ApiRequest
from timeline.gateway.shapes import BulkAnswer, LineAnswer, NewMessage, PutAnswer
from timeline.gateway.values import ToPut, decoded, to_put
from timeline.model import Status, check_topic_name

LINES_AT_ONCE = 1_000
BYTES_AT_ONCE = 4 * 1024 * 1024
FAILED_SHOWN = 1_000
TRACE = ("traceparent", "tracestate")
LINE, LIST = msgspec.json.Decoder(NewMessage), msgspec.json.Decoder(list[NewMessage])
MAX_LIST = 10_000
MAX_LIST_OBJECTS = 200_000
"""In the JSON of a list, those inside payloads included. So its size in memory is known before it is read."""
TOO_LONG = (
    f"an array has at most {MAX_LIST} messages, and {MAX_LIST_OBJECTS} objects in all: send more as "
    "application/x-ndjson, one message per line"
)
KEY_TAKEN = "this Idempotency-Key was used for another message: give each message a key of its own"
STOPPED = ". Neither this line nor any after it was put"


def answer_of_receipt(receipt: Receipt) -> PutAnswer:
    """Return what became of one message."""
    if not receipt.ok:
        return PutAnswer(id=receipt.id, status=receipt.status, detail=why_failed(receipt))
    return PutAnswer(
        id=receipt.id,
        status=receipt.status,
        version=receipt.version,
        due=iso_or_none(receipt.due_ms),
        settled=receipt.settled,
        moved=receipt.moved,
    )


def why_failed(receipt: Receipt) -> str:
    """Return the sentence of a receipt that failed. Empty: it did not."""
    try:
        receipt.raise_failed()
    except TimelineError as error:
        return sentence(error)
    return ""


def _birth(put: ToPut, key: RepeatKey, place: int) -> int:
    """Return the birth of a message. Its trace has no part in it: a repeat may be of another one."""
    fields = put.fields
    headers = sorted((name, text) for name, text in (fields["headers"] or {}).items() if name.lower() not in TRACE)
    when = fields.get("at"), fields.get("in_")
    asked = (fields["id"], *when, fields["tag"], headers, fields["expires"], put.group, put.if_exists)
    return key.birth(place, fields["payload"], *asked)


def listed(body: bytes) -> list[NewMessage]:
    """Return the messages of an array. Raise Invalid or TooLarge."""
    if body.count(b"{") > MAX_LIST_OBJECTS:
        raise TooLarge(TOO_LONG, advice=FIXED_LIMIT)
    messages = decoded(LIST, body)
    if len(messages) > MAX_LIST:
        raise TooLarge(TOO_LONG, advice=FIXED_LIMIT)
    return messages


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """The results of one call, by the places of its messages.

    `refused`: answers to those that were not sent, or whose call failed. `told`: the receipts of the others. `key`: the
    request's key. `first`: the place in the request of this call's first message.
    """

    refused: dict[int, PutAnswer]
    told: list[tuple[Sequence[int], Receipts]]
    key: RepeatKey
    first: int

    def answers(self) -> list[PutAnswer]:
        """Return an answer for each message, in order."""
        return [answer for _, answer in self._sorted(failed_alone=False)]

    def failed(self) -> list[tuple[int, PutAnswer]]:
        """Return the places and answers of those that failed, in order. No object is made for the others."""
        return self._sorted(failed_alone=True)

    def counts(self) -> Counter[str]:
        """Return the number of messages by status."""
        counts: Counter[str] = Counter(answer.status for answer in self.refused.values())
        for _, receipts in self.told:
            counts.update(receipts.counts)
        return counts

    def _sorted(self, failed_alone: bool) -> list[tuple[int, PutAnswer]]:
        answers = dict(self.refused)
        for places, receipts in self.told:
            codes = receipts.status_codes
            failed = (codes != Status.OK.code) & (codes != Status.DUPLICATE.code)
            asked = np.flatnonzero(failed).tolist() if failed_alone else range(len(receipts))
            answers.update((places[at], self._answer(places[at], receipts[at])) for at in asked)
        return sorted(answers.items())

    def _answer(self, place: int, receipt: Receipt) -> PutAnswer:
        answer = answer_of_receipt(receipt)
        if answer.status is Status.EXISTS and answer.id == self.key.id(self.first + place):
            return PutAnswer(id=answer.id, status=answer.status, detail=KEY_TAKEN)
        return answer


class PutRequest:
    """The puts of one request, which go to one topic. `key`: its Idempotency-Key. `trace`: its caller's trace. Raise
    Invalid for a topic's name that cannot be, though nothing is put."""

    def __init__(self, client: CallerClient, topic: str, key: RepeatKey, trace: Mapping[str, str]) -> None:
        self._client, self._topic, self._key, self._trace = client, check_topic_name(topic), key, trace

    def to_put(self, asked: NewMessage, place: int = 0) -> ToPut:
        """Return the message that stands at `place`. Raise Invalid or TooLarge."""
        return to_put(asked, self._key.id(place), self._trace)

    async def one(self, put: ToPut) -> tuple[PutAnswer, bool]:
        """Put one message. Return the answer, and whether the message was created by this call or its repeat."""
        birth = _birth(put, self._key, 0) if self._key else None
        try:
            async with self._client.producer(self._topic, put.group) as producer:
                receipt = await producer.produce(**put.fields, if_exists=put.if_exists, birth=birth)
        except Exists as taken:
            if taken.id != self._key.id(0):
                raise
            raise Exists(id=taken.id, advice=KEY_TAKEN) from None
        answer = answer_of_receipt(receipt)
        return answer, answer.status is Status.OK and not answer.moved

    async def many(self, asked: Sequence[NewMessage]) -> list[PutAnswer]:
        """Put messages, `LINES_AT_ONCE` at a time. Return an answer for each, in order. Raise the error if the call as
        a whole failed."""
        answers: list[PutAnswer] = []
        for first in range(0, len(asked), LINES_AT_ONCE):
            answers += (await self.part(asked[first : first + LINES_AT_ONCE], first)).answers()
        return answers

    async def part(self, asked: Sequence[NewMessage | TimelineError], first: int) -> PutOutcome:
        """Put some messages, which stand at `first` and after it. An error among `asked` is its own answer. Raise the
        error of a call that failed as a whole if nothing was put before."""
        try:
            return await self._groups(asked, first)
        except TimelineError as error:
            if not first:  # the request as a whole has this answer
                raise
            ids = (one.id if isinstance(one, NewMessage) else None for one in asked)
            return PutOutcome({place: refused(error, id) for place, id in enumerate(ids)}, [], self._key, first)

    async def _groups(self, asked: Sequence[NewMessage | TimelineError], first: int) -> PutOutcome:
        wrong: dict[int, PutAnswer] = {}
        groups: dict[str, list[tuple[int, ToPut, Message]]] = {}
        for place, one in enumerate(asked):
            try:
                if isinstance(one, TimelineError):
                    raise one
                put = self.to_put(one, first + place)
                message = Message(**put.fields)
            except (Invalid, TooLarge) as bad:
                wrong[place] = refused(bad)
            else:
                groups.setdefault(put.group, []).append((place, put, message))
        work = (self._group(group, puts, first) for group, puts in groups.items())
        outcome = PutOutcome(wrong, [], self._key, first)
        for puts, told in zip(groups.values(), await asyncio.gather(*work, return_exceptions=True), strict=True):
            if isinstance(told, Receipts):
                outcome.told.append(([place for place, *_ in puts], told))
            elif not isinstance(told, TimelineError) or len(groups) == 1:
                raise told
            else:
                wrong.update((place, refused(told, message.id)) for place, _, message in puts)
        return outcome

    async def _group(self, group: str, placed: list[tuple[int, ToPut, Message]], first: int) -> Receipts:
        batch = Batch.of([message for *_, message in placed])
        if any(put.if_exists is not None for _, put, _ in placed):
            batch.flags = batch.flags | np.array([move_flag(put.if_exists) for _, put, _ in placed], dtype=np.uint8)
        if self._key:
            batch.births = [_birth(put, self._key, first + place) for place, put, _ in placed]
        async with self._client.producer(self._topic, group) as producer:
            return await producer.produce_many(batch)


def refused(error: TimelineError, id: str | None = None) -> PutAnswer:
    """Return an error as the answer to one message."""
    known = error.code in Status.__members__
    status = Status(error.code) if known else Status.UNAVAILABLE
    return PutAnswer(id=error.id or id or "", status=status, detail=sentence(error))


class LineStream:
    """A request's lines of JSON, put as they come. Only a bounded part of them is in memory."""

    def __init__(self, request: ApiRequest, puts: PutRequest) -> None:
        self._request, self._puts = request, puts
        self._line = self._put_lines = self._rest_bytes = 0
        self.stopped: LineAnswer | None = None
        """At the end: where the body broke off, and why. None: it did not."""

    async def answers(self) -> AsyncIterator[list[LineAnswer]]:
        """Yield the answers as they come, in order. Nothing is read before the answers so far were taken. If the body
        breaks off after lines that were put, the last answer says where. Raise the error if none was put."""
        async for line, outcome in self._outcomes():
            yield [_of_line(answer, line[place]) for place, answer in enumerate(outcome.answers())]

    async def summary(self) -> BulkAnswer:
        """Put all, and return what became of them: the counts, and the first failures."""
        counts: Counter[str] = Counter()
        failed: list[LineAnswer] = []
        async for line, outcome in self._outcomes():
            counts += outcome.counts()
            if len(failed) < FAILED_SHOWN:
                failed += [_of_line(answer, line[place]) for place, answer in outcome.failed()]
        del failed[FAILED_SHOWN:]
        good = counts[Status.OK] + counts[Status.DUPLICATE]
        omitted = counts.total() - good - len(failed)
        return BulkAnswer(counts=dict(counts), failed=failed, failed_omitted=omitted, stopped=self.stopped)

    async def _outcomes(self) -> AsyncIterator[tuple[list[int], PutOutcome]]:
        """Yield for each part the numbers of its lines in the body, and what became of them. See `answers`."""
        held: list[tuple[int, bytes]] = []
        held_bytes = 0
        try:
            async for lines in self._lines():
                for line in lines:
                    held.append(line)
                    held_bytes += len(line[1])
                    if len(held) >= LINES_AT_ONCE or held_bytes >= BYTES_AT_ONCE:
                        yield await self._put(held)
                        held, held_bytes = [], 0
                self._request.room.keep(held_bytes + self._rest_bytes)
            if held:
                yield await self._put(held)
        except TimelineError as error:
            if not self._put_lines:  # nothing was put: the call as a whole has this answer
                raise
            self.stopped = _of_line(refused(error), held[0][0] if held else self._line + 1)
            self.stopped.detail += STOPPED

    async def _lines(self) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yield the lines that came at once, each with its number in the body, without empty ones. Raise TooLarge for
        one that is longer than a body may be."""
        rest = bytearray()
        async for part in self._request.chunks():
            rest += part
            if b"\n" in part:
                whole, _, last = bytes(rest).rpartition(b"\n")
                rest = bytearray(last)
                self._rest_bytes = len(rest)
                lines = whole.split(b"\n")
                first, self._line = self._line + 1, self._line + len(lines)
                yield [(number, line) for number, line in enumerate(lines, first) if line.strip()]
            if len(rest) > MAX_BODY_BYTES:
                raise TooLarge(f"line {self._line + 1} has more than {MAX_BODY_BYTES} bytes")
        if rest.strip():
            self._line += 1
            yield [(self._line, bytes(rest))]

    async def _put(self, lines: list[tuple[int, bytes]]) -> tuple[list[int], PutOutcome]:
        await asyncio.sleep(0)  # lines of which none is good would hold up other requests
        outcome = await self._puts.part([_decoded(line) for _, line in lines], self._put_lines)
        self._put_lines += len(lines)
        return [number for number, _ in lines], outcome


def _decoded(line: bytes) -> NewMessage | Invalid:
    try:
        return decoded(LINE, line)
    except Invalid as wrong:
        return wrong


def _of_line(answer: PutAnswer, line: int) -> LineAnswer:
    return LineAnswer(line=line, **msgspec.structs.asdict(answer))
