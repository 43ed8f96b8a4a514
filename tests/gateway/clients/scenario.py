"""One scenario by a client that openapi-python-client has generated: `python scenario.py URL TOPIC`.

It prints what it saw, a line per step. Those of other languages print the same.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from timeline_client import Client
from timeline_client.api.default import (
    ack_leases,
    bury_leases,
    cancel_message,
    create_schedule,
    create_topic,
    delete_schedule,
    lease_messages,
    list_dead_letters,
    move_message,
    next_occurrences,
    pause_schedule,
    put_messages,
    revive_dead_letters,
    show_message,
    update_schedule,
)
from timeline_client.models import (
    AckLeases,
    BuryLeases,
    ChangeSchedule,
    LeasedMessage,
    Leases,
    Leasing,
    LettersAnswer,
    MoveMessage,
    NewMessage,
    NewSchedule,
    NewTopic,
    NextTimes,
    Problem,
    PutAnswer,
    PutAnswers,
    ReviveLetters,
    SettleAnswers,
    StoredMessages,
    StoredSchedule,
    TopicAnswer,
)

T = TypeVar("T")
url, topic = sys.argv[1:]
client = Client(base_url=url)


def told(kind: type[T], answer: Any) -> T:
    assert isinstance(answer, kind), answer
    return answer


def leased() -> LeasedMessage:
    (one,) = told(Leases, lease_messages.sync(topic, client=client, body=Leasing(wait="30s", lease="1m"))).messages
    return one


def ack(receipt: str) -> str:
    (one,) = told(SettleAnswers, ack_leases.sync(client=client, body=AckLeases([receipt]))).results
    return one.status.value


made = told(TopicAnswer, create_topic.sync(topic, client=client, body=NewTopic(lease="30s")))
print("create", made.name == topic, made.settings.lease_ms)
messages = [NewMessage(id="moved", payload={"gate": "A7"}, in_="1h"), NewMessage(id="cancelled", payload=1, in_="1h")]
put = told(PutAnswers, put_messages.sync(topic, client=client, body=messages))
print("put", *(f"{one.id} {one.status.value} {one.version}" for one in put.results))
moved = told(PutAnswer, move_message.sync(topic, "moved", client=client, body=MoveMessage(in_=0)))
print("move", moved.status.value, moved.version)
print("cancel", told(PutAnswer, cancel_message.sync(topic, "cancelled", client=client)).status.value)
print("show", told(Problem, show_message.sync(topic, "cancelled", client=client)).code)
first = leased()
print("lease", first.id, first.payload["gate"], first.deliveries, first.lease_until > first.due)
print("ack", ack(first.receipt), ack(first.receipt))
one = told(PutAnswer, put_messages.sync(topic, client=client, body=NewMessage(id="letter", payload_text="hi", in_=0)))
print("put", one.status.value)
bury = BuryLeases([leased().receipt], "no such gate")
print("bury", told(SettleAnswers, bury_leases.sync(client=client, body=bury)).results[0].status.value)
(dead,) = told(StoredMessages, list_dead_letters.sync(topic, client=client)).messages
print("dead", dead.id, dead.reason)
letters = told(LettersAnswer, revive_dead_letters.sync(topic, client=client, body=ReviveLetters(ids=["letter"])))
print("revive", letters.counts["OK"])
again = leased()
print("lease", again.id, again.payload_text, again.deliveries)
print("ack", ack(again.receipt))
daily = NewSchedule(name="daily", cron="0 9 * * *", payload={"of": "{occurrence}"}, paused=False)
schedule = told(StoredSchedule, create_schedule.sync(topic, client=client, body=daily))
print("schedule", schedule.name, schedule.revision, *schedule.cron, schedule.payload["of"])
change = ChangeSchedule(cron=["0 9 * * *", "0 18 * * *"], zone="Europe/Berlin")
changed = told(StoredSchedule, update_schedule.sync(topic, "daily", client=client, body=change, if_revision=1))
print("change", changed.revision, len(changed.cron), changed.zone)
times = told(NextTimes, next_occurrences.sync(topic, "daily", client=client, limit=4)).times
print("next", len(times), times[0].at < times[3].at)
print("pause", told(StoredSchedule, pause_schedule.sync(topic, "daily", client=client)).status.value)
print("delete", delete_schedule.sync_detailed(topic, "daily", client=client).status_code.value)
