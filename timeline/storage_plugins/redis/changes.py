"""How a call changes messages: decided by the one table of rules, written by compare-and-set.

A change names the whole value that it was decided on. The script writes only if this value still stands. Otherwise it
answers what stands instead, and the call decides again. Items of one call go to the server in parts, so that no script
holds it up for long. On a cluster there is one part per bucket. If a part fails, only its own items answer so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, decide
from timeline.model import Answers, Operation, Status, Topic, TopicSettings, buckets_of
from timeline.storage_plugins.asks import fail, fill, mutation_asks, put_asks, removal, settle_asks
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreError, StoreUnavailable
from timeline.storage_plugins.errors import gravest
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.records import RedisRow, bytes_of, pack, pack_puts, unpack
from timeline.storage_plugins.redis.server import Server

ITEMS_AT_ONCE = 2_000
BYTES_AT_ONCE = 4 * 1024 * 1024
"""The most that one script takes: a few milliseconds, in which the server does nothing else."""
ROUNDS = 100
"""How often a message may change between its read and its write before the call gives up."""


@dataclass(slots=True)
class Items:
    """Changes as columns: under `ids`, `old` (empty: nothing) becomes `new` (empty: nothing). `contents`: payload and
    headers of what is new. `weights`: bytes that travel for each, besides."""

    ids: list[bytes] = field(default_factory=list)
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, id: bytes, old: bytes, new: bytes, content: bytes = b"") -> None:
        """Add a change."""
        self.ids.append(id)
        self.old.append(old)
        self.new.append(new)
        self.contents.append(content)


@dataclass(slots=True)
class ChangeOutcome:
    """The outcome of `Items`: `stands` if something else stood, `failed` if their part failed, else they are written.
    `gone`: the topic was dropped. `contents`, when asked for: of each item written, None if it is gone."""

    stands: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, StoreError] = field(default_factory=dict)
    gone: bool = False
    contents: dict[int, bytes | None] = field(default_factory=dict)


@dataclass(slots=True)
class BucketKeys:
    """The keys of a topic's buckets, and the calls on them."""

    server: Server
    topic: Topic

    def base(self, bucket: int) -> bytes:
        """Return the key of a bucket; the others of the bucket begin with it."""
        return f"{self.server.location.prefix}:{{{self.topic.uid:x}.{bucket}}}".encode()

    def groups(self, buckets: Sequence[int] | None) -> list[list[int]]:
        """Return buckets as one script may take them: all at once, or, on a cluster, each by itself."""
        chosen = sorted(set(buckets)) if buckets is not None else list(range(self.topic.settings.buckets))
        return [[bucket] for bucket in chosen] if self.server.cluster else [chosen] if chosen else []

    async def each(self, script: str, buckets: Sequence[int] | None, *args: Any) -> list[tuple[list[int], Any]]:
        """Run a script with the same arguments for every bucket. Return its answer for each group."""
        groups = self.groups(buckets)
        calls = [([self.base(bucket) for bucket in group], args) for group in groups]
        return list(zip(groups, all_of(await self.server.run_each(script, calls)), strict=True))

    async def fetch(self, ids: Sequence[bytes]) -> list[bytes]:
        """Return the values under `ids`; empty where there is none."""
        found = [b""] * len(ids)
        shares = self._share(list(ids), 0)
        for places, values in zip(
            shares.places, all_of(await self._run(scripts.FETCH, (), shares, [ids])), strict=True
        ):
            for at, value in zip(places, values, strict=True):
                found[at] = value or b""
        return found

    async def put(self, ids: list[bytes], values: list[bytes], contents: list[bytes], weight: int) -> ChangeOutcome:
        """Store these where their ids, all different, are free. `weight`: the bytes of all contents."""
        outcome = ChangeOutcome()
        shares = self._share(ids, weight, contents)
        answers = await self._run(scripts.PUT, (), shares, [ids, values, contents])
        for places, answer in zip(shares.places, answers, strict=True):
            _note(outcome, places, answer)
        return outcome

    async def change(self, items: Items, want: bool = False, waits: bool = True) -> ChangeOutcome:
        """Write the items whose value still stands as it was read. `want`: answer with contents. `waits`: see
        `Server.run_each`."""
        outcome = ChangeOutcome()
        weights = items.weights or [len(content) for content in items.contents]
        shares = self._share(items.ids, sum(weights), weights=weights)
        columns = [items.ids, items.old, items.new, items.contents]
        answers = await self._run(scripts.CHANGE, (b"1" if want else b"0",), shares, columns, waits)
        for places, answer in zip(shares.places, answers, strict=True):
            if isinstance(answer, StoreError):
                _note(outcome, places, answer)
            else:
                _note(outcome, places, answer[0])
                outcome.contents.update(zip(places, answer[1], strict=False))
        return outcome

    async def ack(
        self, ids: list[bytes], births: list[bytes], tokens: list[tuple[bytes, bytes]], now_ms: int
    ) -> tuple[bytes, dict[int, StoreError]]:
        """Remove what is held under these births and (version, holder). Return a digit each, see `scripts.ACK`, and
        what failed."""
        digits, failed = bytearray(b"2" * len(ids)), dict[int, StoreError]()
        numbers = {token: b"%d" % number for number, token in enumerate(dict.fromkeys(tokens), 1)}
        remembers = b"1" if self.topic.settings.remember_ms else b"0"
        head = (now_ms, remembers, len(numbers), *(part for token in numbers for part in token))
        shares = self._share(ids, 0)
        answers = await self._run(scripts.ACK, head, shares, [ids, births, [numbers[token] for token in tokens]])
        for places, answer in zip(shares.places, answers, strict=True):
            if isinstance(answer, StoreError):
                failed.update(dict.fromkeys(places, answer))
                continue
            for at, digit in zip(places, answer, strict=True):
                digits[at] = digit
        return bytes(digits), failed

    async def _run(
        self, script: str, head: tuple[Any, ...], shares: _Shares, columns: Sequence[Sequence[bytes]],
        waits: bool = True,
    ) -> list[Any]:  # fmt: skip
        """Run a script that takes, for each bucket, a count and then the columns' values item by item."""
        ordered = [[column[at] for at in shares.order] for column in columns]
        step = len(columns)
        calls = []
        for part in shares.parts:
            args: list[Any] = list(head)
            for _, start, stop in part:
                args.append(stop - start)
                flat = [b""] * (step * (stop - start))
                for number, column in enumerate(ordered):
                    flat[number::step] = column[start:stop]
                args += flat
            calls.append(([self.base(bucket) for bucket, _, _ in part], args))
        return await self.server.run_each(script, calls, waits)

    def _share(
        self, ids: list[bytes], weight: int, contents: list[bytes] | None = None, weights: list[int] | None = None
    ) -> _Shares:
        """Return items in parts of a few thousand, by bucket; on a cluster one bucket each. `weight`: their bytes."""
        buckets = buckets_of(Ragged.of(ids), self.topic.settings.buckets)
        order = np.argsort(buckets, kind="stable")
        placed = buckets[order]
        edges = [0, *(np.flatnonzero(placed[1:] != placed[:-1]) + 1).tolist(), len(ids)]
        listed = order.tolist()
        runs = [(int(placed[start]), start, stop) for start, stop in pairwise(edges) if stop > start]
        loads = [0] * (len(ids) + 1)
        if weight > BYTES_AT_ONCE:
            sizes = weights or [len(content) for content in contents or ()]
            loads = [0, *accumulate(sizes[at] for at in listed)]
            runs = _by_weight(runs, loads)
        parts: list[list[tuple[int, int, int]]] = []
        room = spent = 0
        for bucket, start, stop in runs:
            while start < stop:
                end = min(stop, start + (room or ITEMS_AT_ONCE))
                load = loads[end] - loads[start]
                if room == 0 or self.server.cluster or spent + load > BYTES_AT_ONCE:
                    parts.append([])
                    room, spent = ITEMS_AT_ONCE, 0
                parts[-1].append((bucket, start, end))
                room, spent, start = room - (end - start), spent + load, end
        places = [listed[part[0][1] : part[-1][2]] for part in parts]
        return _Shares(listed, parts, places)


@dataclass(frozen=True, slots=True)
class _Shares:
    """The items of a call as scripts take them. `order`: by bucket. `parts`: runs (bucket, start, stop) of that order.
    `places`: the items of each part."""

    order: list[int]
    parts: list[list[tuple[int, int, int]]]
    places: list[list[int]]


def _by_weight(runs: list[tuple[int, int, int]], loads: list[int]) -> list[tuple[int, int, int]]:
    """Cut runs that carry too much for one script. `loads`: the bytes before each item."""
    cut: list[tuple[int, int, int]] = []
    for bucket, start, stop in runs:
        for at in range(start + 1, stop):
            if loads[at + 1] - loads[start] > BYTES_AT_ONCE:
                cut.append((bucket, start, at))
                start = at
        cut.append((bucket, start, stop))
    return cut


def _note(outcome: ChangeOutcome, places: list[int], answer: Any) -> None:
    """Note the answer of a part's script (numbers and what stands, in turn), or its failure."""
    if isinstance(answer, StoreError):
        outcome.failed.update(dict.fromkeys(places, answer))
        return
    for number, stands in zip(answer[::2], answer[1::2], strict=True):
        if number < 0:
            outcome.gone = True
        else:
            outcome.stands[places[number]] = stands


def all_of(answers: list[Any]) -> list[Any]:
    """Return the answers; raise if one failed."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers


def standing(packed: bytes, now_ms: int, settings: TopicSettings) -> RedisRow | None:
    """Return the message of a value; None if there is none, or if its id is remembered no longer."""
    if not packed:
        return None
    stored = unpack(packed)
    faded = stored.message.remembered and stored.settled_ms <= now_ms - settings.remember_ms
    return None if faded else stored


def left_of(stored: RedisRow, ask: Ask, decision: Decision, now_ms: int, settings: TopicSettings) -> bytes | None:
    """Return the value that `decision` leaves of `stored`; None if it stays as it is."""
    message = decision.message
    gone = None if stored.message.remembered else removal(ask, decision)
    if gone is None:
        return (
            None if message is None or message is stored.message else pack(dataclasses.replace(stored, message=message))
        )
    last_op, remembers = gone
    return kept(stored, last_op, now_ms) if remembers and settings.remember_ms else b""


def kept(stored: RedisRow, last_op: int, now_ms: int) -> bytes:
    """Return the value of a remembered id."""
    old = stored.message
    message = dataclasses.replace(
        old, remembered=True, last_op=last_op, holder=b"", group=b"", dead=b"", due_ms=0, scheduled_ms=0, asked_ms=0,
        deliveries=0, expires_ms=0, died_ms=0,
    )  # fmt: skip
    return pack(RedisRow(message, settled_ms=now_ms))


@dataclass(slots=True)
class RedisCall:
    """Items of one call decided one by one, each on what the ones before it left. `asks`: what these ask. `news`: for
    puts, the value and the content that each stores where nothing stands. `dry_run`: decide, change nothing.
    `written`: something was changed. `gone`: the topic was dropped."""

    keys: BucketKeys
    now_ms: int
    ids: Sequence[bytes]
    answers: Answers
    asks: dict[int, Ask] = field(default_factory=dict)
    news: tuple[list[bytes], list[bytes]] = ([], [])
    dry_run: bool = False
    troubles: list[StoreError] = field(default_factory=list)
    written: bool = False
    gone: bool = False

    def ask(self, at: int, stored: RedisRow | None) -> Ask | None:
        """Return what is asked of an item, of which this stands; None where there is nothing to decide."""
        return self.asks[at]

    async def decide(self, chosen: Sequence[int], known: dict[int, bytes] | None = None) -> None:
        """Decide and write the items at `chosen`. `known`: values of some, just read."""
        waves: list[list[int]] = []
        seen: dict[bytes, int] = {}
        for at in chosen:
            turn = seen.get(self.ids[at], -1) + 1
            seen[self.ids[at]] = turn
            if turn == len(waves):
                waves.append([])
            waves[turn].append(at)
        for number, wave in enumerate(waves):
            await self._decide_wave(wave, known if number == 0 and known else {})

    async def _decide_wave(self, wave: list[int], known: dict[int, bytes]) -> None:
        values = dict(known)
        unread = [at for at in wave if at not in values]
        if unread:
            try:
                found = await self.keys.fetch([self.ids[at] for at in unread])
            except StoreUnavailable as error:
                self.fail(dict.fromkeys(wave, error))
                return
            values.update(zip(unread, found, strict=True))
        settings = self.keys.topic.settings
        pending = wave
        for _ in range(ROUNDS):
            items, decisions, places = Items(), [], []
            for at in pending:
                stored = standing(values[at], self.now_ms, settings)
                ask = self.ask(at, stored)
                if ask is None:
                    continue
                decision = decide(stored.message if stored else None, ask, self.now_ms, settings)
                content = b""
                new: bytes | None = None
                if decision.born:
                    new, content = self.news[0][at], self.news[1][at]
                elif stored is not None and not decision.repeat and not self.dry_run:
                    new = left_of(stored, ask, decision, self.now_ms, settings)
                if new is None:
                    fill(self.answers, at, decision)
                    continue
                places.append(at)
                decisions.append(decision)
                items.add(self.ids[at], values[at], new, content)
            if not places:
                return
            outcome = await self.keys.change(items)
            self.gone |= outcome.gone
            self.written |= len(outcome.stands) + len(outcome.failed) < len(items)
            self.fail({places[number]: error for number, error in outcome.failed.items()})
            for number, at in enumerate(places):
                if number not in outcome.stands and number not in outcome.failed:
                    fill(self.answers, at, decisions[number])
            pending = [places[number] for number in outcome.stands]
            values.update((places[number], stands) for number, stands in outcome.stands.items())
            if not pending:
                return
        self.fail(dict.fromkeys(pending, StoreUnavailable("other calls change this message all the time")))

    def fail(self, failed: dict[int, StoreError]) -> None:
        """Note the answers of items that failed."""
        for error in dict.fromkeys(failed.values()):
            fail(self.answers, [at for at, one in failed.items() if one is error], error)
        self.troubles += failed.values()

    def finish(self) -> Answers:
        """Return the answers; raise if all of them failed."""
        if self.gone:
            return dropped(self.keys.topic, len(self.answers))
        if self.troubles and len(self.troubles) == len(self.answers):
            raise gravest(self.troubles)
        return self.answers


# ── puts, settles and mutations by id ──


def _contents(puts: Puts) -> list[bytes]:
    payloads = puts.payloads.tolist()
    if not puts.headers.nbytes:
        return payloads
    return [payload + headers for payload, headers in zip(payloads, puts.headers.tolist(), strict=True)]


async def put(keys: BucketKeys, now_ms: int, puts: Puts) -> Answers:
    """`Store.put`: all as if their ids were free. The rules decide those whose ids are not."""
    count = len(puts)
    answers = Answers.blank(count)
    ids, contents, values = puts.ids.tolist(), _contents(puts), pack_puts(puts, now_ms)
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
        return dropped(keys.topic, count)
    chosen = np.asarray(plain, dtype=np.intp)
    answers.version[chosen] = 1
    answers.due_ms[chosen] = puts.due_ms[chosen]
    call = RedisCall(keys, now_ms, ids, answers, news=(values, contents))
    call.fail({plain[number]: error for number, error in outcome.failed.items()})
    rest = [plain[number] for number in outcome.stands]
    if len(plain) < count:
        rest = sorted({*rest, *set(range(count)).difference(plain)})
    if rest:
        answers.version[rest] = answers.due_ms[rest] = 0
        known = {plain[number]: stands for number, stands in outcome.stands.items()}
        call.asks = dict(zip(rest, put_asks(puts.take(np.array(rest))), strict=True))
        await call.decide(rest, known)
    return call.finish()


def _first(ids: list[bytes]) -> list[int]:
    """Return where each id comes first."""
    return sorted({id: at for at, id in zip(range(len(ids) - 1, -1, -1), reversed(ids), strict=True)}.values())


async def settle(keys: BucketKeys, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`. One script does the acks whose token matches, the rules all else."""
    ids = settles.ids.tolist()
    call = RedisCall(keys, now_ms, ids, Answers.blank(len(ids), Status.NOT_FOUND))
    left = await _ack(call, settles) if len(set(ids)) == len(ids) else list(range(len(ids)))
    if left:
        call.asks = dict(zip(left, settle_asks(settles.take(np.array(left))), strict=True))
        await call.decide(left)
    return call.finish()


async def _ack(call: RedisCall, settles: Settles) -> list[int]:
    """Do the plain acks. Return which settles are left to decide."""
    acks = np.flatnonzero(settles.operation == Operation.ACK)
    if not len(acks):
        return list(range(len(settles)))
    places, births = acks.tolist(), bytes_of(settles.birth[acks])
    holders = settles.holders.tolist()
    tokens = list(zip(bytes_of(settles.version[acks]), [holders[at] for at in places], strict=True))
    digits, failed = await call.keys.ack([call.ids[at] for at in places], births, tokens, call.now_ms)
    call.fail({places[n]: error for n, error in failed.items()})
    found = np.frombuffer(digits, dtype=np.uint8) - ord("0")
    done = acks[found < 2]
    call.answers.status[done] = Status.OK.code
    call.answers.late[done] = found[found < 2]
    passed = set(done.tolist()).union(places[n] for n in failed)
    return [at for at in range(len(settles)) if at not in passed] if len(passed) < len(settles) else []


async def mutate(keys: BucketKeys, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    ids, asks = mutations.ids.tolist(), dict(enumerate(mutation_asks(mutations)))
    call = RedisCall(keys, now_ms, ids, Answers.blank(len(ids), Status.NOT_FOUND), asks)
    await call.decide(range(len(ids)))
    return call.finish()
