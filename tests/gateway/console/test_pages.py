"""What pages say and do, as the broker has it, and what they answer to what is wrong."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

import httpx
import pytest

import timeline
from tests.gateway.console.stage import DEAD, EMPTY, PICKY, TOPIC, WAITING, Console, bury
from timeline.driver.mutations import TagProgress
from timeline.gateway.console.rendering import part
from timeline.gateway.console.tags import TagWork
from timeline.gateway.console.visit import Fields
from timeline.model import State, Status

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGES = (
    "/", "/late", "/dead", f"/dead?topic={TOPIC}", "/schedules", f"/schedule?topic={TOPIC}&name=daily", "/produce",
    "/cluster", f"/topic?name={TOPIC}", f"/message?topic={TOPIC}&id=order-1", "/find?q=nothing", "/login",
)  # fmt: skip


def seen(answer: httpx.Response) -> str:
    """What somebody reads on a page."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", answer.text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text)))


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_is_whole_and_guarded(console: Console, path: str) -> None:
    answer = await console.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("</html>")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|style=|javascript:", answer.text), "code or style in a page"
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text):
        held = await console.get(name)
        assert held.status_code == 200 and "immutable" in held.headers["cache-control"]
    assert not re.search(r'(?:src|href|action)="(?:https?:)?//', answer.text), "something from elsewhere"


async def test_a_topic_and_its_messages_are_as_the_broker_has_them(console: Console, tl: timeline.Timeline) -> None:
    told = seen(await console.get("/topic", name=TOPIC))
    record = next(each for each in await tl.topics() if each.name == TOPIC)
    assert (
        f"{record.settings.lease_ms // 1000}s" in told
        or 'value="30s"' in (await console.get("/topic", name=TOPIC)).text
    )
    listed: set[str] = set()
    path = f"/messages?topic={TOPIC}&state=waiting"
    while path:
        answer = await console.get(path)
        listed.update(re.findall(r">(order-\d+)</a>", answer.text))
        following = re.search(r'hx-get="([^"]+)"', answer.text)
        path = html.unescape(following[1]) if following else ""
    assert listed == {entry.id async for entry in tl.scan(TOPIC, state="waiting") if entry.id.startswith("order-")}
    assert len(listed) == WAITING


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"tag": "tag-1", "state": "waiting"}, {f"order-{at}" for at in range(1, WAITING, 4)}),
        ({"prefix": "order-11"}, {"order-11", *(f"order-{at}" for at in range(110, WAITING))}),
        ({"state": "dead", "tag": "autumn"}, {f"lost-{at}" for at in range(0, DEAD, 3)}),
        ({"due_from": "2001-01-01T00:00", "due_to": "2001-01-02T00:00", "zone": "Asia/Tokyo"}, set()),
    ],
)
async def test_filters_choose_messages(console: Console, query: dict[str, Any], ids: set[str]) -> None:
    answer = await console.get("/messages", topic=TOPIC, **query)
    assert set(re.findall(r">((?:order|lost)-\d+)</a>", answer.text)) == ids
    if not ids:
        assert "No message matches" in answer.text


async def test_a_message_shows_all_that_it_has(console: Console) -> None:
    told = seen(await console.get("/message", topic=TOPIC, id="order-5"))
    for word in ("tag-1", "content-type", "application/json", '"to": "ada"', "7b 22 74 6f", "It waits, due at"):
        assert word in told
    dead = seen(await console.get("/message", topic=TOPIC, id="lost-0"))
    assert f"{PICKY} refused it" in dead and "Revive" in dead and "Deliver now" not in dead
    held = await console.get("/message/payload", topic=TOPIC, id="order-5")
    assert held.json() == {"to": "ada", "lines": [1, 2]}
    assert held.headers["content-disposition"].startswith("attachment")
    assert held.headers["content-type"] == "application/octet-stream"


async def test_a_message_is_put_moved_delivered_now_and_cancelled(console: Console, tl: timeline.Timeline) -> None:
    put = {"topic": TOPIC, "payload": "hello\r\nyou", "in": "2h", "id": "steered", "tag": "by hand", "headers": "a: b"}
    answer = await console.post("/produce", put)
    assert answer.status_code == 303 and "id=steered" in answer.headers["location"]
    one = await tl.get(TOPIC, "steered")
    assert one is not None and one.payload == b"hello\nyou" and one.headers == {"a": "b"} and one.tag == "by hand"
    page = f"/message?topic={TOPIC}&id=steered"
    form = {"group": "default", "version": one.version}
    picked = {"do": "move", "at": "2031-05-01T09:30", "zone": "Europe/Berlin"}
    assert (await console.post(page, form | picked)).status_code == 303
    moved = await tl.get(TOPIC, "steered")
    assert moved is not None and moved.due.isoformat() == "2031-05-01T07:30:00+00:00"
    stale = await console.post(page, form | {"do": "cancel"})
    assert stale.status_code == 412 and "changed since" in stale.text
    form["version"] = moved.version
    assert (await console.post(page, form | {"do": "now"})).status_code == 303
    now = await tl.get(TOPIC, "steered")
    assert now is not None and now.state is State.AVAILABLE
    form["version"] = now.version
    assert (await console.post(page, form | {"do": "cancel"})).status_code == 303
    assert await tl.get(TOPIC, "steered") is None
    told = seen(await console.get("/topic", name=TOPIC))
    assert "steered was cancelled." in told
    assert "steered was cancelled." not in seen(await console.get("/topic", name=TOPIC)), "a notice is shown once"


async def test_dead_letters_are_found_counted_and_revived_spread_over_time(
    console: Console, tl: timeline.Timeline
) -> None:
    topic = "letters"
    await tl.create_topic(topic)
    await bury(tl, [f"gone-{at}" for at in range(90)], topic)
    found = await console.get("/dead/letters", topic=topic, tag="autumn", reason="SMTP.example")
    assert "30 of 30 match" in seen(found)
    asked = {"topic": topic, "tag": "autumn", "reason": "SMTP.example"}
    refused = await console.post("/dead/step", asked | {"do": "purge"}, hx_request="true")
    assert "count all that match first" in refused.text
    when = {"at": "2031-01-01T01:00", "spread": "10m", "due_zone": "Europe/Berlin"}
    counted = (await console.post("/dead/step", asked | when | {"do": "count"}, hx_request="true")).text
    assert "<b>30</b> of 30 dead letters with this tag match" in counted
    fields = dict(re.findall(r'<input [^>]*name="(\w+)" value="([^"]*)"', counted))
    assert {name: fields[name] for name in when} == when, "what was typed stands beside the button, and may be changed"
    revived = await console.post("/dead/step", fields | {"do": "revive"}, hx_request="true")
    assert "30 revived, spread over 10m" in revived.text
    due = sorted([entry.due_ms async for entry in tl.scan(topic, state="waiting")])
    assert len(due) == 30 and due[0] == 1_924_992_000_000
    assert {later - sooner for sooner, later in itertools.pairwise(due)} == {20_000}
    chosen = {"topic": topic, "do": "purge", "id": ["?group=default&id=gone-1", "?group=default&id=gone-2"]}
    assert "2 deleted for good" in (await console.post("/dead/step", chosen, hx_request="true")).text
    assert len([letter async for letter in tl.dead(topic)]) == 58


async def test_all_messages_of_a_tag_are_counted_moved_and_cancelled(console: Console, tl: timeline.Timeline) -> None:
    topic, tag = "campaigns", "spring & <b>"
    await tl.create_topic(topic)
    async with tl.producer(topic) as producer:
        batch = timeline.Batch(payloads=[b"x"] * 40, in_="30d", tags=[tag] * 30 + ["other"] * 10)
        (await producer.produce_many(batch)).raise_failed()
    assert "Count, to move or cancel them" not in seen(await console.get("/topic", name=topic))
    assert "Count, to move or cancel them" in (await console.get("/topic", name=topic, tag=tag)).text
    asked = {"topic": topic, "tag": tag, "group": "default"}

    async def step(**fields: str) -> httpx.Response:
        return await console.post("/tag/step", asked | fields, hx_request="true")

    counted = await step(do="count")
    assert "<b>30</b> messages may be moved or cancelled" in counted.text and "Move all 30" in counted.text
    wrong = await step(do="move", counted="30", at="tomorrow")
    assert "is no time" in wrong.text and "Move all 30" in wrong.text, "the form stays, with what is wrong"
    picked = {"at": "2031-05-01T09:30", "zone": "Europe/Berlin"}
    assert "30 moved." in (await step(do="move", counted="30", **picked)).text
    due = [one.due.isoformat() async for one in tl.scan(topic, tag=tag)]
    assert due == ["2031-05-01T07:30:00+00:00"] * 30
    assert "30 cancelled." in (await step(do="cancel", counted="30")).text
    assert [one.tag async for one in tl.scan(topic)] == ["other"] * 10
    assert (await step(do="all")).status_code == 400


async def test_messages_of_a_tag_are_cancelled_from_where_a_step_ended(console: Console, tl: timeline.Timeline) -> None:
    topic = "large"
    await tl.create_topic(topic)

    class Enough(Exception):
        pass

    def stop(told: TagProgress) -> None:
        if told.done:
            raise Enough(told.resume)

    async with tl.producer(topic) as producer:
        batch = timeline.Batch(payloads=[b"x"] * 12_000, in_="1d", tags=["all"] * 12_000)
        (await producer.produce_many(batch)).raise_failed()
        with pytest.raises(Enough) as ended:
            await producer.cancel_tag("all", progress=stop)
    fields = {"topic": topic, "tag": "all", "do": "cancel", "counted": "12000", "resume": str(ended.value)}
    while "resume" in fields:
        told = (await console.post("/tag/step", fields, hx_request="true")).text
        fields = dict(re.findall(r'<input [^>]*name="(\w+)" value="([^"]*)"', told))
    assert "12,000 cancelled." in told, told
    assert not [one async for one in tl.scan(topic)]
    broken = await console.post("/tag/step", {"topic": topic, "tag": "all", "do": "cancel", "resume": "no token"})
    assert broken.status_code == 400 and "this is no resume token" in broken.text


def test_work_on_a_tag_may_be_stopped_while_it_runs() -> None:
    """A button that is disabled while a step is under way could not be pressed: the next one begins at once."""
    work = TagWork("cancel", TagProgress({Status.OK: 5}), 10, resume="token")
    shown = part("_tag_work.html", work=work, fields={"topic": "t"}, given=Fields({}), trouble="", csrf="")
    assert "data-stop" in shown and "data-running" in shown and "hx-disabled-elt" not in shown
    assert 'value="token"' in shown and 'value="5"' in shown and 'max="10"' in shown


async def test_a_path_that_is_none_is_a_page_for_browsers_and_a_problem_for_programs(console: Console) -> None:
    browser = await console.http.get("/nowhere", headers={"accept": "text/html,*/*;q=0.8"})
    assert browser.status_code == 404 and "There is no page '/nowhere'." in seen(browser)
    assert "default-src 'self'" in browser.headers["content-security-policy"]
    for path in ("/nowhere", "/v1/nowhere"):
        answer = await console.http.get(path, headers={"accept": "*/*"})
        assert answer.status_code == 404 and answer.json()["code"] == "NOT_FOUND"


async def test_a_dead_letter_is_revived_and_purged_on_its_own_page(console: Console, tl: timeline.Timeline) -> None:
    topic = "single-letters"
    await tl.create_topic(topic)
    await bury(tl, ["back", "away"], topic)
    page = f"/message?topic={topic}&id="
    shown = seen(await console.get("/message", topic=topic, id="back"))
    assert "dead letter" in shown and "Revive" in shown and "Move" not in shown.partition("Actions")[2]
    form = {"group": "default", "do": "revive", "in": "2h"}
    assert (await console.post(f"{page}back", form)).headers["location"].endswith("id=back")
    one = await tl.get(topic, "back")
    assert one is not None and one.state is State.WAITING
    assert (await console.post(f"{page}away", {"group": "default", "do": "purge"})).status_code == 303
    assert [letter async for letter in tl.dead(topic)] == []
    again = await console.post(f"{page}away", {"group": "default", "do": "purge"})
    assert again.status_code == 404


async def test_reasons_are_counted(console: Console) -> None:
    told = (await console.get("/dead/reasons", topic=TOPIC)).text
    assert "<b>20</b> … after … s" in told and f"<b>10</b> {PICKY} refused it: … no user …" in told
    assert told.rstrip().endswith("event: end\ndata: end")


async def test_schedules_are_shown_made_and_steered(console: Console, tl: timeline.Timeline) -> None:
    told = seen(await console.get("/schedules"))
    assert "daily" in told and "At 09:00" in told and "paused" in told
    week = seen(await console.get("/schedules/week", zone="Europe/Berlin"))
    assert "in Europe/Berlin" in week and week.count("daily") in (6, 7)
    rules = {"cron": "30 6 * * 1", "zone": "Europe/Berlin"}
    assert "T06:30:00+" in (await console.post("/schedules/preview", rules)).text
    made = await console.post("/schedules/create", rules | {"topic": TOPIC, "name": "weekly", "payload": "x"})
    assert made.status_code == 303
    one = await tl.get_schedule(TOPIC, "weekly")
    assert one is not None and one.specification.cron == ("30 6 * * 1",)
    page = f"/schedule?topic={TOPIC}&name=weekly"
    for deed, status in (("pause", "paused"), ("resume", "active")):
        assert (await console.post(page, {"do": deed})).status_code == 303
        assert (await one.refresh()).status == status
    assert (await console.post(page, {"do": "trigger"})).status_code == 303
    assert [m.id async for m in tl.scan(TOPIC) if m.id.startswith("weekly@")]
    assert (await console.post(page, {"do": "delete"})).status_code == 303
    assert await tl.get_schedule(TOPIC, "weekly") is None
    wrong = await console.post("/schedules/create", {"topic": TOPIC, "name": "weekly", "cron": "61 * * * *"})
    assert wrong.status_code == 400 and "61" in seen(wrong) and 'value="weekly"' in wrong.text


async def test_a_refused_form_of_settings_keeps_what_was_typed_and_resumes_nothing(
    console: Console, tl: timeline.Timeline
) -> None:
    await tl.create_topic("held", paused=True)
    form = {"paused": "on", "was_paused": "True", "lease": "soon", "was_lease": "30s", "push_rate": "5"}
    refused = (await console.post("/topic/settings?topic=held", form | {"was_push_rate": "0"})).text
    assert 'name="paused" checked' in refused and 'value="soon"' in refused
    again = dict(re.findall(r'<input (?:type="hidden" )?name="(\w+)" value="([^"]*)"', refused))
    assert (again["was_paused"], again["was_lease"], again["was_push_rate"]) == ("True", "30s", "0")
    saved = await console.post("/topic/settings?topic=held", again | {"lease": "40s", "paused": "on"})
    assert saved.status_code == 303
    settings = next(each.settings for each in await tl.topics() if each.name == "held")
    assert (settings.paused, settings.lease_ms, settings.push_rate) == (True, 40_000, 5)


async def test_a_message_that_was_there_already_is_not_called_new(console: Console) -> None:
    form = {"topic": TOPIC, "payload": "same", "in": "3h", "id": "twice-by-hand"}
    for words in ("is on the timeline", "was on the timeline of mails already"):
        answer = await console.post("/produce", form)
        assert words in seen(await console.get(answer.headers["location"]))


async def test_a_refused_deed_leaves_the_message_and_what_was_typed_on_its_page(console: Console) -> None:
    page = f"/message?topic={TOPIC}&id=order-9"
    refused = await console.post(page, {"do": "move", "in": "soon", "zone": "Asia/Tokyo"})
    assert refused.status_code == 400 and "in must be" in seen(refused)
    assert 'value="soon"' in refused.text and 'value="Asia/Tokyo"' in refused.text and "tag-1" in seen(refused)


async def test_another_site_loads_no_parts(console: Console) -> None:
    for path in ("/dead/reasons?topic=mails&every=1", "/find?q=x", "/"):
        other = {"Sec-Fetch-Site": "cross-site"}
        answer = await console.http.get(path, headers=other | {"Sec-Fetch-Mode": "no-cors"})
        assert answer.status_code == 403 and "follow a link" in seen(answer)
        arrived = await console.http.get(path, headers=other | {"Sec-Fetch-Mode": "navigate"})
        assert arrived.status_code == 200 and "One moment" in arrived.text


async def test_a_cause_that_nothing_had_is_said(console: Console) -> None:
    assert "No delivery of the last 10m was late for this reason" in seen(
        await console.get("/late", since="10m", cause="CLOCK")
    )


async def test_schedules_are_searched(console: Console) -> None:
    found = seen(await console.get("/schedules", q="ail", topic=TOPIC))
    assert "daily" in found and "hourly" not in found
    assert "None of those that were read fits." in seen(await console.get("/schedules", q="weekly"))


async def test_a_form_that_is_sent_twice_puts_one_message(console: Console, tl: timeline.Timeline) -> None:
    drawn = re.search(r'name="drawn" value="(\w+)"', (await console.get("/produce", topic=TOPIC)).text)
    assert drawn
    form = {"topic": TOPIC, "payload": "once", "in": "3h", "tag": "twice", "drawn": drawn[1]}
    answers = [await console.post("/produce", form) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [303, 303]
    assert [entry.id async for entry in tl.scan(TOPIC, tag="twice")] == [drawn[1]]
    changed = await console.post("/produce", form | {"payload": "changed"})
    assert changed.status_code == 409, "another message, which nobody takes for a repeat"
    other = await console.post("/produce", form | {"drawn": "f" * 16, "id": drawn[1], "payload": "other"})
    assert other.status_code == 409 and "\nother</textarea>" in other.text, "what was typed stays"


async def test_the_list_of_topics_counts_their_dead_letters(console: Console) -> None:
    listed = await console.get("/dead")
    count = re.search(rf'hx-get="(/dead/count[^"]*{TOPIC}[^"]*)"', listed.text)
    assert count and f"{DEAD}" in (await console.get(html.unescape(count[1]))).text


async def test_a_topic_is_created_changed_paused_and_resumed(console: Console, tl: timeline.Timeline) -> None:
    assert (await console.post("/topic/create", {"name": "fresh"})).status_code == 303
    changes = {"lease": "45s", "was_lease": "30s", "max_deliveries": "25", "was_max_deliveries": "25"}
    assert (await console.post("/topic/settings?topic=fresh", changes | {"was_paused": "False"})).status_code == 303
    wrong = await console.post("/topic/settings?topic=fresh", {"lease": "soon", "was_lease": "45s"})
    assert wrong.status_code == 400 and "lease" in seen(wrong) and 'value="soon"' in wrong.text, "what was typed stays"
    assert (await console.post("/topic/pause?topic=fresh", {"do": "pause"})).status_code == 303
    settings = next(each.settings for each in await tl.topics() if each.name == "fresh")
    assert settings.lease_ms == 45_000 and settings.paused
    assert (await console.post("/topic/pause?topic=fresh", {"do": "resume"})).status_code == 303
    assert not next(each.settings for each in await tl.topics() if each.name == "fresh").paused
    taken = await console.post("/topic/create", {"name": "not/a name"})
    assert taken.status_code == 400 and "letters" in seen(taken)


async def test_a_message_is_found_by_id_by_tag_and_by_a_part_of_a_late_one(
    console: Console, tl: timeline.Timeline
) -> None:
    exact = await console.get("/find", q="order-7")
    assert exact.status_code == 303 and exact.headers["location"] == f"/message?topic={TOPIC}&id=order-7"
    by_tag = seen(await console.get("/find", q="tag-2"))
    assert "order-2" in by_tag and "order-3 " not in by_tag and "All messages of mails with this tag" in by_tag
    await tl.create_topic("slow")
    async with tl.producer("slow") as producer:
        await producer.produce(b"", id="customer-4711-reminder", at=(await _now(tl)) - 60_000)
    while (overdue := await console.get("/find", q="4711")).status_code != 303:
        pass  # which topics have due messages is known with the next look
    assert "no consumer has it" in seen(await console.get(overdue.headers["location"]))
    (late,) = await tl.take("slow", 1, "20s")
    await tl.settle([late.receipt], "ack")
    for _ in range(50):  # a slow machine may not look at all due messages in time, and then says so
        found = await console.get("/find", q="4711")
        if found.status_code == 303:
            break
    assert found.status_code == 303, found.text
    told = seen(await console.get(found.headers["location"]))
    assert "late" in told and "it was put or moved too late" in told and "no longer on the timeline" in told
    assert "customer-4711-reminder" in seen(await console.get("/late"))


async def _now(tl: timeline.Timeline) -> int:
    return (await tl.standing()).brokers[0].now_ms


async def test_what_is_wrong_is_said(console: Console) -> None:
    for path, status, words in (
        ("/topic?name=nowhere", 404, "there is no topic 'nowhere'"),
        ("/messages?topic=mails&cursor=!!", 400, "this is no cursor"),
        ("/messages?topic=mails&due_from=soon", 400, "is no time"),
        (f"/dead?topic={TOPIC}&died_from=2031-01-01T00:00&zone=Mars", 400, "there is no time zone 'Mars'"),
        ("/late?since=long", 400, "since must be"),
        ("/load?window=2y", 400, "window is one of"),
        ("/schedule?topic=mails&name=none", 404, "there is no schedule"),
        ("/static/none.css", 404, "No such page"),
    ):
        answer = await console.get(path)
        assert answer.status_code == status, path
        assert words in seen(answer), path
    gone = seen(await console.get("/message", topic=TOPIC, id="nobody"))
    assert "no message 'nobody' is on mails" in gone
    nothing = seen(await console.get("/find", q="nobody"))
    assert "Nothing was found" in nothing
    assert "No message matches" in seen(await console.get("/messages", topic=EMPTY))
    form = await console.post("/produce", {"topic": TOPIC, "payload": "kept <b>", "in": "soon"})
    assert form.status_code == 400 and "in must be" in seen(form) and "kept &lt;b&gt;" in form.text


async def test_a_form_without_a_deed_does_nothing(console: Console, tl: timeline.Timeline) -> None:
    for deed in ({}, {"do": "Purge"}):
        answer = await console.post(f"/message?topic={TOPIC}&id=lost-1", deed)
        assert answer.status_code == 400 and "do is move, now, cancel, revive or purge" in seen(answer)
        assert (await console.post(f"/topic/pause?topic={TOPIC}", deed)).status_code == 400
    letter = await tl.get(TOPIC, "lost-1")
    assert letter is not None and letter.state is State.DEAD


async def test_a_kind_of_reason_chooses_its_letters_alone(console: Console, tl: timeline.Timeline) -> None:
    topic = "kinds"
    await tl.create_topic(topic)
    for ids, reason in ((["a", "b"], "504 after 31 s"), (["c"], "looked after 2 s"), (["d"], "17"), (["e"], "none")):
        await bury(tl, ids, topic, reason)
    told = (await console.get("/dead/reasons", topic=topic, prefix="", died_from="2020-01-01T00:00")).text
    links = {kind: html.unescape(path) for path, kind in re.findall(r'href="([^"]+)"><b>\d+</b> ([^<]+)</a>', told)}
    assert set(links) == {"… after … s", "looked after … s", "…", "none"}
    assert all("died_from=2020-01-01T00%3A00" in path for path in links.values()), "other filters stay"
    found = await console.get(links["… after … s"].replace("/dead?", "/dead/letters?"))
    assert set(re.findall(r">(\w)</a>", found.text)) == {"a", "b"}
    assert set(re.findall(r">(\w)</a>", (await console.get(links["…"].replace("/dead?", "/dead/letters?"))).text)) == {
        "d"
    }


async def test_letters_that_die_after_the_count_are_left_alone(console: Console, tl: timeline.Timeline) -> None:
    topic = "later"
    await tl.create_topic(topic)
    await bury(tl, ["counted"], topic)
    counted = (await console.post("/dead/step", {"topic": topic, "do": "count"}, hx_request="true")).text
    carried = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', counted))
    await bury(tl, ["later"], topic)
    purged = await console.post("/dead/step", carried | {"do": "purge"}, hx_request="true")
    assert "1 deleted for good" in purged.text
    assert [letter.id async for letter in tl.dead(topic)] == ["later"]


@pytest.mark.parametrize("closed", [b"", b"]" * 1_000])
@pytest.mark.parametrize("depth", [1_000, 30_000])
async def test_json_of_many_levels_is_shown_as_text(
    console: Console, tl: timeline.Timeline, depth: int, closed: bytes
) -> None:
    """Whatever brackets stand in texts before it."""
    id = f"deep-{depth}-{len(closed)}"
    async with tl.producer(TOPIC) as producer:
        nested = b"[" * depth + b"]" * depth
        await producer.produce(b'["%s\\"", %s]' % (closed, nested) if closed else nested, id=id, in_="1h")
    answer = await console.get("/message", topic=TOPIC, id=id)
    assert answer.status_code == 200 and len(answer.content) < 2_000_000
    assert "<summary>JSON</summary>" not in answer.text and "<summary>Text</summary>" in answer.text
