"""The file of tokens, and what a broker makes of it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.security.guarded import Tokens
from timeline.broker.api.access import ANYBODY
from timeline.broker.server import gatekeeper
from timeline.broker.server import tokens as module
from timeline.broker.server.gatekeeper import Expelled, Gatekeeper
from timeline.broker.server.tokens import TokenRecord, change_tokens, digest, id_of, parse_tokens, read_tokens, token_of
from timeline.errors import Invalid
from timeline.logs import JsonLines, TextLines
from timeline.metrics import Metrics
from timeline.wire import Fault, TransportError

TOKEN = token_of("0123456789ab", "c" * 64)


def entry(id: str = "0123456789ab", **other: object) -> TokenRecord:
    return TokenRecord(**({
        "id": id, "name": "web", "sha256": digest(TOKEN), "rights": ("produce",), "topics": ("*",), "groups": ("*",),
        "created_ms": 1, "expires_ms": 0,
    } | other))  # type: ignore[arg-type]  # fmt: skip


def said(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_what_is_written_is_read_and_has_no_token_in_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    odd = entry("a" * 12, name="späte Züge", topics=("orders*", "a,b"), expires_ms=5)
    change_tokens(path, lambda tokens: [*tokens.values(), entry()])
    change_tokens(path, lambda tokens: [*tokens.values(), odd])
    assert list(read_tokens(path).values()) == [entry(), odd]
    assert "c" * 64 not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["tokens.json"]


def test_changes_at_once_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    def add(number: int) -> None:
        change_tokens(path, lambda tokens: [*tokens.values(), entry(f"{number:012x}")])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tokens(path)) == 16


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    change_tokens(path, lambda tokens: [entry()])
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        change_tokens(path, lambda tokens: [1 // 0])  # type: ignore[list-item]
    assert path.read_bytes() == before


GOOD = json.loads(module.shown_tokens([entry()]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must begin with"),
        ('{"timeline_tokens": 2, "tokens": []}', "must begin with"),
        ('{"timeline_tokens": 1}', "no list"),
        (json.dumps(GOOD | {"tokens": [1]}), "token 1: a token has id"),
        (json.dumps(GOOD | {"tokens": [GOOD["tokens"][0], GOOD["tokens"][0]]}), "the id 0123456789ab twice"),
        *(
            (json.dumps(GOOD | {"tokens": [GOOD["tokens"][0] | bad]}), says)
            for bad, says in [
                ({"more": 1}, "nothing else"),
                ({"id": "xyz"}, "12 and 64 hex digits"),
                ({"sha256": 5}, "sha256 is a text"),
                ({"name": "a\nb"}, "printable"),
                ({"rights": ["everything"]}, "a right is one of produce, consume, admin, operator, schedule, broker"),
                ({"rights": []}, "at least one right"),
                ({"rights": "produce"}, "rights is a list"),
                ({"topics": [""]}, "1 to 255 printable characters"),
                ({"groups": ["a\udcff"]}, "1 to 255 printable characters"),
                ({"created_ms": 10**20}, "since 1970"),
                ({"groups": ["x"] * 101}, "up to 100 groups"),
                ({"expires_ms": "soon"}, "whole number"),
                ({"expires_ms": -1}, "since 1970"),
            ]
        ),
    ],
)
def test_what_is_no_file_of_tokens_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(Invalid, match=says) as refused:
        parse_tokens(text, "t.json")
    assert "t.json" in refused.value.reason


def test_a_file_that_others_may_write_is_refused(tokens: Tokens) -> None:
    tokens.path.chmod(0o620)
    with pytest.raises(Invalid, match="chmod 600"):
        read_tokens(tokens.path)
    tokens.path.chmod(0o644)  # hashes are nothing to hide: a volume of a cluster has them so
    assert read_tokens(tokens.path) == {}


@pytest.mark.parametrize("what", ["", "timeline_", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "x" * 10_000_000])
def test_what_is_no_token_has_no_id(what: str) -> None:
    assert id_of(what) == ""
    assert id_of(TOKEN) == "0123456789ab"


def test_hashes_are_compared_in_constant_time_whether_or_not_the_id_is_known(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: an unknown id costs as many hashes and comparisons as a wrong secret under a known one."""
    good = tokens.add("web", "produce")
    gate = Gatekeeper(str(tokens.path), lambda: 0, Metrics())
    work: list[str] = []
    constant_time = hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        work.append(f"compare {len(one)} {len(other)}")
        return constant_time(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    costs = []
    for token in (token_of(id_of(good), "0" * 64), token_of("f" * 12, "0" * 64)):
        work.clear()
        with pytest.raises(TransportError, match="never created, or has been revoked") as refused:
            gate.identify("Ping", said(token))
        assert refused.value.fault is Fault.UNAUTHENTICATED
        costs.append(list(work))
    assert costs[0] == costs[1] == ["compare 64 64"]
    assert gate.identify("Ping", said(good)).name == "web"


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        (None, "no token"),
        ([], "no token"),
        ([("authorization", "Basic d2ViOndlYg==")], "no token"),
        ([("authorization", TOKEN)], "no token"),
        ([("authorization", b"Bearer \xff\xfe")], "no token"),
        ([("authorization", "Bearer " + "x" * 100_000)], "no token"),
        ([("authorization", f"bearer {TOKEN}")], "no token"),
        ([("authorization", f"Bearer {TOKEN} ")], "no token"),
        ([("authorization", f"Bearer {TOKEN}")], "unknown token"),
    ],
)
def test_who_shows_nothing_good_is_refused_and_counted(
    tokens: Tokens, metadata: list[tuple[str, str | bytes]] | None, cause: str
) -> None:
    metrics = Metrics()
    gate = Gatekeeper(str(tokens.path), lambda: 0, metrics)
    with pytest.raises(TransportError) as refused:
        gate.identify("Ping", metadata)
    assert refused.value.fault is Fault.UNAUTHENTICATED
    assert TOKEN not in str(refused.value)
    assert metrics.registry.get_sample_value("timeline_access_refused_total", {"cause": cause}) == 1


def test_the_last_of_two_headers_counts_and_nothing_else(tokens: Tokens) -> None:
    """gRPC joins or repeats headers; whichever way, one that is bad lets nobody in by another one beside it."""
    good = tokens.add("web", "produce")
    gate = Gatekeeper(str(tokens.path), lambda: 0, Metrics())
    with pytest.raises(TransportError):
        gate.identify("Ping", [*said(good), ("authorization", "Bearer x")])


def test_expiry_is_to_the_millisecond(tokens: Tokens) -> None:
    token = tokens.add("web", "produce", expires_ms=1_000)
    now_ms = 999
    gate = Gatekeeper(str(tokens.path), lambda: now_ms, Metrics())
    assert gate.identify("Ping", said(token)).name == "web"
    now_ms = 1_000
    with pytest.raises(TransportError, match="'web' has expired"):
        gate.identify("Ping", said(token))


def test_a_changed_file_counts_at_the_next_look_and_a_broken_one_changes_nothing(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    first = tokens.add("web", "produce")
    gate = Gatekeeper(str(tokens.path), lambda: 0, Metrics())
    second = tokens.add("worker", "consume")
    with pytest.raises(TransportError):
        gate.identify("Ping", said(second))
    gate.look()
    assert gate.identify("Ping", said(second)).name == "worker"
    good = tokens.path.read_text()
    with caplog.at_level(logging.ERROR, "timeline.broker"):
        tokens.path.write_text("{")
        for _ in range(3):
            gate.look()
        tokens.path.unlink()
        gate.look()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2, "each trouble once"
    assert gate.identify("Ping", said(first)).name == "web"
    tokens.path.write_text(good)
    tokens.path.chmod(0o600)
    tokens.revoke("web")
    gate.look()
    with pytest.raises(TransportError):
        gate.identify("Ping", said(first))


def test_a_broker_does_not_begin_without_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        Gatekeeper(str(tmp_path / "none.json"), lambda: 0, Metrics())


async def test_who_may_not_stay_is_told_why(tokens: Tokens) -> None:
    revoked, changed = tokens.add("web", "produce"), tokens.add("worker", "consume")
    expiring, staying = tokens.add("guest", "consume", expires_ms=50), tokens.add("ops", "admin")
    now_ms = 0
    gate = Gatekeeper(str(tokens.path), lambda: now_ms, Metrics())

    async def stay(token: str) -> str:
        try:
            with gate.serving(gate.identify("Consume", said(token))):
                await asyncio.get_running_loop().create_future()
        except Expelled as why:
            return why.reason
        return "left"

    stays = [asyncio.create_task(stay(token)) for token in (revoked, changed, expiring, staying)]
    await asyncio.sleep(0)
    gate.look()
    assert not any(task.done() for task in stays)
    tokens.revoke("web")
    more = list(read_tokens(tokens.path).values())
    widened = [
        TokenRecord(**{field: getattr(each, field) for field in module.FIELDS} | {"topics": ("t",)})
        if each.name == "worker"
        else each
        for each in more
    ]  # fmt: skip
    change_tokens(tokens.path, lambda _: widened)
    now_ms = 50
    gate.look()
    _done, _pending = await asyncio.wait(stays, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*stays[:3])
    assert "revoked" in stays[0].result()
    assert "have changed" in stays[1].result()
    assert "'guest' has expired" in stays[2].result()
    assert not stays[3].done()
    stays[3].cancel()  # as when the client goes: that is no refusal
    with pytest.raises(asyncio.CancelledError):
        await stays[3]
    assert not gate._guests


def test_without_a_file_everybody_is_anybody() -> None:
    gate = Gatekeeper("", lambda: 0, Metrics())
    assert gate.identify("Ping", said(TOKEN)) is ANYBODY
    assert gate.identify("Mutate", [("timeline-as-operator", "1")]).as_operator


def test_logs_cut_out_what_looks_like_a_token() -> None:
    record = logging.LogRecord("timeline", logging.INFO, __file__, 1, "came with %s", (TOKEN,), None)
    record.header = f"Bearer {TOKEN}"
    for formatter in (JsonLines(), TextLines()):
        line = formatter.format(record)
        assert "c" * 8 not in line
        assert line.count("timeline_0123456789ab_…") == 2


def test_refusals_are_told_to_the_log_in_one_line_however_many(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gatekeeper(str(tokens.path), lambda: 0, Metrics())
    for _ in range(10_000):
        with pytest.raises(TransportError):
            gate.identify("Ping", None)
    gate.refused_to("ipv4:192.0.2.1:5")
    gate.look()
    gate.look()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "calls were refused: 10000 with no token; the last one from ipv4:192.0.2.1:5"
    ]
    assert gatekeeper.LOOK_EVERY_S <= 0.5
