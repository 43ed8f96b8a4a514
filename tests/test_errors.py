"""Errors: each says its code, whether to try again, which message, and what to do."""

from __future__ import annotations

import copy
import pickle

import pytest

from timeline import errors
from timeline.errors import TimelineError
from timeline.model import Status

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TimelineError) and kind is not TimelineError
]
RETRYABLE = {"THROTTLED", "UNAVAILABLE", "UNKNOWN"}


def test_every_status_that_is_no_success_is_an_error_and_three_conditions_are_the_drivers_own() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(codes) == len(set(codes))
    assert set(codes) == {status.value for status in Status} - {"OK", "DUPLICATE"} | {
        "SUPERSEDED",
        "LEASE_LOST",
        "CLOSED",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_it_means(kind: type[TimelineError]) -> None:
    error = kind()
    assert kind.__name__.lower() == kind.code.replace("_", "").lower()
    assert error.retryable == (kind.code in RETRYABLE)
    assert error.advice and kind.__doc__
    assert str(error) == f"{kind.code}: {error.advice}"
    assert (error.id, error.retry_after_ms) == (None, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_its_message_and_its_reason(kind: type[TimelineError]) -> None:
    error = kind("not so", id="UA1545", retry_after_ms=250)
    # The reason of TOO_LARGE is a number alone: the sentence says what to do, as HTTP and the command line do.
    assert str(error) == (errors.explain(error) if kind is errors.TooLarge else f"{kind.code} 'UA1545': not so")
    assert (error.id, error.reason, error.retry_after_ms) == ("UA1545", "not so", 250)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_crosses_processes_whole(kind: type[TimelineError], way: object) -> None:
    error = kind("not so", id="UA1545", retry_after_ms=250)
    assert callable(way)
    again = way(error)
    assert type(again) is kind
    assert (again.id, again.reason, again.retry_after_ms) == (error.id, error.reason, error.retry_after_ms)
    assert str(again) == str(error)


def test_too_large_says_in_python_what_http_and_the_command_line_say() -> None:
    error = errors.TooLarge("a payload of this topic may take 5 bytes, not 6", id="a")
    sentence = f"a payload of this topic may take 5 bytes, not 6; {errors.TooLarge.advice}"
    assert errors.sentence_of(error) == sentence and "max_payload_bytes" in sentence
    assert str(error) == errors.explain(error) == f"TOO_LARGE 'a': {sentence}"
    fixed = errors.TooLarge("headers take 9 bytes", advice=errors.FIXED_LIMIT)
    assert str(fixed) == f"TOO_LARGE: headers take 9 bytes; {errors.FIXED_LIMIT}"


def test_invalid_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="out of its allowed range"):
        raise errors.Invalid()
