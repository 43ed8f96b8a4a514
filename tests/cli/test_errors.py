"""What the command line makes of an error: a sentence with what to do, and an exit code."""

from __future__ import annotations

import re

import pytest

import timeline
from tests.cli.conftest import Call
from timeline.cli.app import exit_code_of
from timeline.errors import (
    STAYS,
    Closed,
    Exists,
    Fenced,
    Forbidden,
    Invalid,
    Leased,
    LeaseLost,
    NotFound,
    TimelineError,
    Unavailable,
    Unknown,
    explain,
)
from timeline.storage_plugins.contract import StoreRefused


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Invalid("x"), 2),
        (Unavailable(), 3),
        (Unknown(), 3),
        (Closed(), 3),
        (NotFound(id="a"), 4),
        (Exists(id="a"), 4),
        (LeaseLost(), 4),
    ],
)
def test_exit_codes_of_errors(error: TimelineError, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_error_says_its_consequence_on_one_line() -> None:
    assert explain(NotFound(id="UA1545")) == f"NOT_FOUND 'UA1545': {NotFound.advice}"
    assert explain(Unavailable("connection\nrefused")) == "UNAVAILABLE: connection refused; nothing happened: try again"
    assert explain(Unavailable("restart it.")) == "UNAVAILABLE: restart it; nothing happened: try again"
    lasting = Unavailable(f"it speaks TLS; {STAYS}")
    lasting.lasting = True
    assert explain(lasting) == f"UNAVAILABLE: it speaks TLS; {STAYS}"
    assert explain(Fenced("it is at revision 2: read it again")) == "FENCED: it is at revision 2: read it again"
    assert explain(Forbidden("token 'web' may not", id="a")) == "FORBIDDEN 'a': token 'web' may not"
    assert explain(Forbidden(id="a")).endswith("another producer group: act for that one (group=…, --group NAME)")
    assert explain(Invalid("give a time")) == "give a time"
    assert explain(StoreRefused("there is no file")) == "REFUSED: there is no file"
    assert explain(Unknown("no answer: it may or may not have happened", id="a")) == (
        "UNKNOWN 'a': no answer: it may or may not have happened; repeat the same call (same id) to learn which"
    )


@pytest.mark.processes
def test_a_refusal_speaks_of_this_commands_options(tell: Call, topic: str, address: str) -> None:
    tell("produce", topic, "one", "--in", "1h", "--id", "a")
    taken = tell("produce", topic, "two", "--in", "2h", "--id", "a")
    assert taken.code == 4 and "choose another --id, or --if-exists replace to replace it" in taken.err
    tell("produce", topic, "one", "--in", "1h", "--id", "c")
    moved = tell("produce", topic, "two", "--in", "2h", "--id", "c", "--if-exists", "move")
    assert moved.code == 0 and moved.out.startswith("c moved: only its due time changed, its payload stays, due ")
    assert re.search(r"payload +one\n", tell("show", topic, "c").out)
    tell("produce", topic, "x", "--in", "1h", "--id", "b", "--tag", "theirs", "--group", "ops")
    for command in (("cancel",), ("move", "--in", "2h")):
        refused = tell(command[0], topic, "--tag", "theirs", *command[1:])
        assert refused.code == 1 and "0 of 1" in refused.out and "--group NAME" in refused.err
    for command in (("move", "--in", "2h"), ("cancel",)):
        stale = tell(command[0], topic, "a", *command[1:], "--if-version", 9)
        assert stale.code == 4 and "another version than --if-version says" in stale.err and "token" not in stale.err
    tell("move", topic, "a", "--in", "0s")
    with timeline.connect_sync(address) as tl, tl.consumer(topic) as c:
        assert c.take() is not None
        moved, cancelled = tell("move", topic, "a", "--in", "2h"), tell("cancel", topic, "a")
        assert (moved.code, moved.err) == (4, f"timeline: LEASED 'a': {Leased.advice}\n")
        assert cancelled.code == 4 and cancelled.err.endswith("or cancel it all the same with --leased\n")
        versioned = tell("cancel", topic, "a", "--if-version", 3)
        assert versioned.code == 4 and "--leased" in versioned.err
