"""Messages by id inside a transaction: found, decided by the one table of rules, changed. Each store of the family says
how it looks them up and writes what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from timeline.leases import Ask, Decision, Message, decide
from timeline.model import Answers, Status, Topic, buckets_of
from timeline.storage_plugins.asks import fill, mutation_asks, removal, tag_ask
from timeline.storage_plugins.contract import Mutations, TagMutation
from timeline.storage_plugins.sql.rows import Stored


class Changes(ABC):
    """What a call changes, gathered, then written in a few statements. `key`: the number that rows carry for the
    topic."""

    __slots__ = ("key", "now_ms", "remembered", "removed", "topic", "updated")

    def __init__(self, topic: Topic, key: int, now_ms: int) -> None:
        self.topic = topic
        self.key = key
        self.now_ms = now_ms
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted: by row what is changed, what is removed, and what is left of it by id."""
        self.updated: dict[int, Message] = {}
        self.removed: list[Stored] = []
        self.remembered: list[tuple[bytes, Message]] = []

    @abstractmethod
    def load(self, ids: Sequence[bytes], buckets: Sequence[int]) -> dict[bytes, Stored]:
        """What stands under `ids` and stays so until the transaction ends: messages, and remembered ids within the
        topic's time."""

    @abstractmethod
    def write(self) -> None:
        """Writes all that was noted, and starts afresh."""

    def remove(self, id: bytes, stored: Stored, last_op: int = 0, remember: bool = True) -> Stored | None:
        """Removes a message; answers what is left of it on a topic that remembers."""
        self.updated.pop(stored.row, None)
        self.removed.append(stored)
        if not remember or not self.topic.settings.remember_ms:
            return None
        left = left_of(stored.message, last_op)
        self.remembered.append((id, left))
        return Stored(0, left)

    def apply(self, stored: Stored | None, id: bytes, ask: Ask, decision: Decision) -> Stored | None:
        """Notes what `decision` changes of `stored`; answers what then stands under the id."""
        if stored is None or not stored.row:
            return stored
        gone = removal(ask, decision)
        if gone is not None:
            return self.remove(id, stored, *gone)
        if decision.message is not None and decision.message is not stored.message:
            self.updated[stored.row] = decision.message
            return Stored(stored.row, decision.message, stored.size_bytes)
        return stored


def left_of(message: Message, last_op: int) -> Message:
    """What a topic that remembers keeps of a message."""
    return Message(message.birth, message.version, last_op=last_op, payload_sum=message.payload_sum, remembered=True)


def decide_each(
    changes: Changes, ids: Sequence[bytes], buckets: Sequence[int], asks: Sequence[Ask], answers: Answers,
    places: Sequence[int],
) -> list[int]:  # fmt: skip
    """Decides `asks` in order, each on what the ones before left, notes their changes and fills `answers` at `places`.
    Answers the indexes of the puts whose own message is new, and of what comes after them under the same id: the caller
    stores the first of each id, and asks about the others again."""
    wanted = dict(zip(ids, buckets, strict=True))
    standing = changes.load(list(wanted), list(wanted.values()))
    settings, now_ms = changes.topic.settings, changes.now_ms
    born: set[bytes] = set()
    waiting: list[int] = []
    for at, (id, ask) in enumerate(zip(ids, asks, strict=True)):
        if id in born:
            waiting.append(at)
            continue
        stored = standing.get(id)
        decision = decide(stored.message if stored else None, ask, now_ms, settings)
        left = changes.apply(stored, id, ask, decision)
        if decision.born:
            born.add(id)
            waiting.append(at)
        if left is None:
            standing.pop(id, None)
        else:
            standing[id] = left
        fill(answers, places[at], decision)
    return waiting


def firsts_of(ids: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """Those of `places` where an id comes first."""
    return sorted({ids[at]: at for at in reversed(places)}.values())


def mutate(changes: Changes, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    count = len(mutations)
    answers = Answers.blank(count)
    asks = mutation_asks(mutations)
    ids = mutations.ids.tolist()
    buckets = buckets_of(mutations.ids, changes.topic.settings.buckets).tolist()
    decide_each(changes, ids, buckets, asks, answers, range(count))
    changes.write()
    return answers


def mutate_tagged(
    changes: Changes, mutation: TagMutation, found: Iterable[tuple[bytes, Stored]]
) -> tuple[Counter[int], int | None]:
    """Does `mutation` on the messages found, each under its id: counts by status, and the earliest due of the moved."""
    counts: Counter[int] = Counter()
    dues_ms: list[int] = []
    for id, stored in found:
        ask = tag_ask(mutation, stored.message)
        if ask is None:
            counts[Status.INVALID.code] += 1
            continue
        decision = decide(stored.message, ask, changes.now_ms, changes.topic.settings)
        counts[decision.status.code] += 1
        if mutation.dry_run:
            continue
        changes.apply(stored, id, ask, decision)
        if decision.status is Status.OK and decision.message is not None:
            dues_ms.append(decision.message.due_ms)
    changes.write()
    return counts, min(dues_ms, default=None)
