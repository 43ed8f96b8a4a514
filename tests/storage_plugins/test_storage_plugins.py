"""Finding a store by its URL: what is said when it cannot be found, and that no secret is said with it."""

from __future__ import annotations

import itertools
import json
from importlib.metadata import EntryPoint

import pytest

from timeline import storage_plugins
from timeline.model import Answers, Displaced, Topic, TopicSettings
from timeline.storage_plugins import make_store, open_store, plugins, records, shown
from timeline.storage_plugins.asks import fail
from timeline.storage_plugins.contract import Opened, Store, StoreRefused, StoreUnavailable
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.records import read_settings
from timeline.storage_plugins.redis import store as redis_store


def test_plugins_are_found_by_their_scheme() -> None:
    assert {"memory", "sqlite"} <= plugins().keys()
    assert isinstance(make_store("memory://"), MemoryStore)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memroy://", "did you mean memory://?"),
        ("sqlit:///a.db", "did you mean sqlite://?"),
        ("zzz://host", "Known schemes: "),
        ("memory", "did you mean memory://?"),
        ("", "Known schemes: "),
        ("memory://shared", "takes nothing after it"),
    ],
)
def test_a_url_that_names_no_store_is_refused_with_what_would(url: str, said: str) -> None:
    with pytest.raises(StoreRefused, match=said.replace("?", r"\?")) as refused:
        make_store(url)
    assert not refused.value.retryable


@pytest.mark.parametrize(
    "url",
    [
        "postgre://ops:hunter2@db:5432/timeline",
        "postgre://ops:hun%2Fter2@db/timeline?password=hunter2",
        "postgre://ops:p@hunter2@db/timeline",
        "postgre://db/timeline?user=ops&password=hunter2#hunter2",
        "ops:hunter2@db",
    ],
)
def test_a_refusal_never_repeats_a_password(url: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        make_store(url)
    assert "hunter2" not in str(refused.value) and "hun%2F" not in str(refused.value)
    assert "db" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*sorted(plugins()), "postgre"])
def test_no_special_character_in_a_password_has_part_of_it_shown(scheme: str) -> None:
    parts = ("hunter2", "hunter3", "hunter4")
    for first, second in itertools.product("@:/#?%&=[];,+ '", repeat=2):
        password = f"{parts[0]}{first}{parts[1]}{second}{parts[2]}"
        for options in ("", "?bad=1", "?tls=maybe"):
            url = f"{scheme}://ops:{password}@127.0.0.1:1/0{options}"
            said = shown(url)
            try:
                make_store(url)
            except StoreRefused as refused:
                said += str(refused)
            assert not [part for part in parts if part in said], (url, said)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sqlite:////data/a.db", "sqlite:////data/a.db"),
        ("redis://:secret@h1:6379/0?x=1", "redis://…@h1:6379/0"),
        ("postgresql://ops:hunter2?x@db/d", "postgresql://…@"),
        ("mysql://ops:12hunter#2@db", "mysql://…@"),
        ("redis://h1:6379,h2:6379/0?payloads=s3://key@bucket", "redis://h1:6379,h2:6379/0"),
        ("redis://user:sec?ret@h1:6379/0", "redis://…@"),
        ("redis://user:sec#ret@h1:6379/0", "redis://…@"),
        ("redis://user:s@cr#t@h1:6379/0", "redis://…@"),
        ("redis://user:secret", "redis://…"),
        ("redis://user:sec/ret", "redis://…"),
        ("redis://:secret", "redis://…"),
        ("redis:user:secret", "redis:…"),
        ("redis:secret", "redis:…"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("localhost:6379", "localhost:6379"),
        ("memory://", "memory://"),
        ("sqlite:///" + "x" * 200, "sqlite:///" + "x" * 149 + "…"),
    ],
)
def test_a_url_as_it_may_be_printed(url: str, text: str) -> None:
    assert shown(url) == text


@pytest.mark.parametrize("url", ["redis:user:hunter2", "redis://user:hunter2", "rediss:hunter2", "redis://:hunter2/0"])
def test_a_password_without_its_at_sign_is_not_shown(url: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        make_store(url)
    assert "hunter2" not in str(refused.value)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("redis", "a_driver_that_is_not_installed:Store", storage_plugins.GROUP)
    monkeypatch.setattr(storage_plugins, "plugins", lambda: {"redis": point})
    told = r"a_driver_that_is_not_installed.*pip install 'timeline-scheduler\[redis\]'"
    with pytest.raises(StoreRefused, match=told):
        make_store("redis://h")


async def test_a_store_that_cannot_be_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Store] = []

    class Unreachable(MemoryStore):
        async def open(self) -> Opened:
            raise StoreUnavailable("nobody answers")

        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(storage_plugins, "make_store", lambda _: Unreachable())
    with pytest.raises(StoreUnavailable, match="nobody answers"):
        await open_store("memory://")
    assert len(closed) == 1


async def test_open_store_opens() -> None:
    store = await open_store("memory://")
    await store.check()
    await store.close()
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.check()


def test_a_message_that_failed_displaced_nothing() -> None:
    answers = Answers.blank(3)
    answers.displaced = {at: Displaced(birth=at, version=1, expired=False) for at in range(3)}
    fail(answers, [0, 2], StoreUnavailable("not now"))
    assert answers.displaced.keys() == {1}


def test_records_of_topics_keep_settings_that_they_do_not_know() -> None:
    standing = Topic("t", 5, TopicSettings(lease_ms=7), 2, 9, newer='{"urgency": 1}')
    assert records.topic_of(5, "t", records.settings_text(standing), 2, 9) == standing
    assert redis_store.topic_of(redis_store.text_of(standing)) == standing
    assert json.loads(records.settings_text(standing))["urgency"] == 1
    assert read_settings("t", {"lease_ms": 7, "urgency": 1}) == (standing.settings, standing.newer, ())
    assert read_settings("t", {}) == (TopicSettings(), "", ())
