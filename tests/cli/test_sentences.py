"""What the command line makes of an error: a sentence with what to do, and an exit code."""

from __future__ import annotations

import pytest

from timeline.cli.app import exit_code_of, explain
from timeline.errors import (
    STAYS,
    Closed,
    Exists,
    Forbidden,
    Invalid,
    LeaseLost,
    NotFound,
    TimelineError,
    Unavailable,
    Unknown,
)


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
    assert explain(Unavailable(f"it speaks TLS; {STAYS}")) == f"UNAVAILABLE: it speaks TLS; {STAYS}"
    assert explain(Forbidden("token 'web' may not", id="a")) == "FORBIDDEN 'a': token 'web' may not"
    assert explain(Forbidden(id="a")).endswith("another producer group: act for that one (group=…, --group NAME)")
    assert explain(Invalid("give a time")) == "give a time"
    assert explain(Unknown("no answer: it may or may not have happened", id="a")) == (
        "UNKNOWN 'a': no answer: it may or may not have happened; repeat the same call (same id) to learn which"
    )
