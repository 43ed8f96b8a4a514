"""Puts, settles and mutations by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from timeline.columns import Int64, UInt64
from timeline.leases import Ask, Message
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.asks import mutation_asks, put_ask, settle_ask
from timeline.storage_plugins.contract import Mutations, Puts, Settles
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.redis.changes import Call, Keys
from timeline.storage_plugins.redis.records import FREE, HEAD, HEAD_BYTES, Stored
from timeline.storage_plugins.redis.server import Server


def _contents(puts: Puts) -> list[bytes]:
    payloads = puts.payloads.tolist()
    if not puts.headers.nbytes:
        return payloads
    return [payload + headers for payload, headers in zip(payloads, puts.headers.tolist(), strict=True)]


def _values(puts: Puts, now_ms: int) -> list[bytes]:
    """The values of the puts as they are stored where nothing stands."""
    count = len(puts)
    heads = np.zeros(count, dtype=HEAD)
    heads["birth"] = puts.birth
    heads["version"] = 1
    heads["due_ms"] = heads["scheduled_ms"] = puts.due_ms
    heads["put_ms"] = heads["asked_ms"] = now_ms
    heads["expires_ms"] = puts.expires_ms
    heads["payload_sum"] = puts.payload_sum
    heads["payload_bytes"] = puts.sizes
    heads["headers_bytes"] = puts.headers.sizes
    heads["group_size"] = puts.groups.sizes
    heads["tag_size"] = puts.tags.sizes
    heads["kind"] = FREE
    packed = heads.tobytes()
    cuts = range(0, count * HEAD_BYTES, HEAD_BYTES)
    strings = zip(cuts, puts.tags.tolist(), puts.groups.tolist(), strict=True)
    return [packed[cut : cut + HEAD_BYTES] + tag + group for cut, tag, group in strings]


async def put(server: Server, topic: Topic, now_ms: int, puts: Puts) -> Answers:
    """`Store.put`: all as if nothing stood; what meets something is decided by the rules."""
    count = len(puts)
    answers = Answers.blank(count)
    keys, ids, contents, values = Keys(server, topic), puts.ids.tolist(), _contents(puts), _values(puts, now_ms)
    weight = puts.payloads.nbytes + puts.headers.nbytes
    late = puts.never_deliverable(now_ms)
    first = range(count) if len(set(ids)) == count else _first(ids)
    plain = first
    if late.any() or len(first) < count:
        doubtful = {ids[at] for at in np.flatnonzero(late).tolist()}
        plain = [at for at in first if ids[at] not in doubtful]
        chosen_ids, chosen_values, chosen_contents = ([c[at] for at in plain] for c in (ids, values, contents))
        outcome = await keys.put(chosen_ids, chosen_values, chosen_contents, weight)
    else:
        outcome = await keys.put(ids, values, contents, weight)
    if outcome.gone:
        return dropped(topic, count)
    chosen = np.asarray(plain, dtype=np.intp)
    answers.version[chosen] = 1
    answers.due_ms[chosen] = puts.due_ms[chosen]
    call = Call(keys, now_ms, ids, _LazyAsks(puts), answers)
    call.fail({plain[number]: error for number, error in outcome.failed.items()})
    rest = [plain[number] for number in outcome.stands]
    if len(plain) < count:
        rest = sorted({*rest, *set(range(count)).difference(plain)})
    if rest:
        answers.version[rest] = answers.due_ms[rest] = 0
        for at in rest:
            call.births[at] = (_born(puts, at, now_ms), contents[at])
        known = {plain[number]: stands for number, stands in outcome.stands.items()}
        await call.decide(rest, known)
        if call.gone:
            return dropped(topic, count)
    return call.finish()


def _first(ids: list[bytes]) -> list[int]:
    """Where each id comes first."""
    return sorted({id: at for at, id in zip(range(len(ids) - 1, -1, -1), reversed(ids), strict=True)}.values())


class _LazyAsks(list[Ask]):
    """What a put asks, made for the few that the rules decide."""

    def __init__(self, puts: Puts) -> None:
        super().__init__()
        self._puts = puts

    def __getitem__(self, at: int) -> Ask:  # type: ignore[override]
        return put_ask(self._puts, at)


def _born(puts: Puts, at: int, now_ms: int) -> Stored:
    message = Message(
        birth=int(puts.birth[at]),
        version=1,
        due_ms=int(puts.due_ms[at]),
        scheduled_ms=int(puts.due_ms[at]),
        asked_ms=now_ms,
        group=puts.groups[at],
        expires_ms=int(puts.expires_ms[at]),
        payload_sum=int(puts.payload_sum[at]),
    )
    return Stored(message, now_ms, puts.tags[at], int(puts.sizes[at]), int(puts.headers.sizes[at]))


async def settle(server: Server, topic: Topic, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`. Acks whose token matches are done by one script, all else by the rules."""
    ids = settles.ids.tolist()
    call = Call(Keys(server, topic), now_ms, ids, _LazySettles(settles), Answers.blank(len(ids), Status.NOT_FOUND))
    left: Sequence[int] = range(len(ids))
    if len(set(ids)) == len(ids):
        left = await _ack(call, settles)
    await call.decide(left)
    return dropped(topic, len(ids)) if call.gone else call.finish()


async def _ack(call: Call, settles: Settles) -> list[int]:
    """Does the plain acks; answers which settles are left to decide."""
    acks = np.flatnonzero(settles.operation == Operation.ACK)
    if not len(acks):
        return list(range(len(settles)))
    places, births = acks.tolist(), _eights(settles.birth[acks])
    holders = settles.holders.tolist()
    tokens = list(zip(_eights(settles.version[acks]), [holders[at] for at in places], strict=True))
    digits, failed = await call.keys.ack([call.ids[at] for at in places], births, tokens, call.now_ms)
    call.fail({places[n]: error for n, error in failed.items()})
    found = np.frombuffer(digits, dtype=np.uint8) - ord("0")
    done = acks[found < 2]
    call.answers.status[done] = Status.OK.code
    call.answers.late[done] = found[found < 2]
    passed = set(done.tolist()).union(places[n] for n in failed)
    return [at for at in range(len(settles)) if at not in passed] if len(passed) < len(settles) else []


def _eights(numbers: Int64 | UInt64) -> list[bytes]:
    """Each number as the eight bytes of it that stand in a value."""
    packed: list[bytes] = np.ascontiguousarray(numbers.astype("<u8")).view("V8").tolist()
    return packed


class _LazySettles(list[Ask]):
    """What a settle asks, made for those that the rules decide."""

    def __init__(self, settles: Settles) -> None:
        super().__init__()
        self._settles = settles

    def __getitem__(self, at: int) -> Ask:  # type: ignore[override]
        return settle_ask(self._settles, at)


async def mutate(server: Server, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    return await _decided(server, topic, now_ms, mutations.ids.tolist(), mutation_asks(mutations))


async def _decided(server: Server, topic: Topic, now_ms: int, ids: list[bytes], asks: list[Ask]) -> Answers:
    call = Call(Keys(server, topic), now_ms, ids, asks, Answers.blank(len(ids), Status.NOT_FOUND))
    await call.decide(range(len(ids)))
    return dropped(topic, len(ids)) if call.gone else call.finish()


__all__ = ["mutate", "put", "settle"]
