"""The circuit of one host."""

from __future__ import annotations

import pytest

from timeline.gateway.push.circuit import CAP_MS, MOST_OF_HOST, Circuit, Host, Receiver


def opened(failures: int = 3) -> Circuit:
    circuit = Circuit(lambda: 0.0, failures)
    for _ in range(failures):
        assert circuit.admit(0.0)
        circuit.failed(0.0)
    return circuit


def test_it_opens_after_failures_in_a_row_alone() -> None:
    circuit = Circuit(lambda: 0.0, 3)
    for _ in range(10):
        circuit.failed(0.0)
        circuit.failed(0.0)
        circuit.succeeded()
    assert circuit.admit(0.0) and not circuit.open
    assert not opened().admit(999.0)


def test_one_probe_goes_at_a_time_and_decides() -> None:
    circuit = opened()
    assert circuit.wait_ms(400.0) == 600.0
    assert circuit.admit(1_000.0)
    assert not circuit.admit(1_000.0) and circuit.wait_ms(9_999.0) == float("inf")
    circuit.failed(1_500.0)
    assert circuit.wait_ms(1_500.0) == 2_000.0, "twice as long"
    assert circuit.admit(3_500.0)
    circuit.succeeded()
    assert circuit.wait_ms(3_500.0) == 0 and circuit.admit(3_500.0) and circuit.admit(3_500.0)


def test_requests_from_before_do_not_lengthen_the_wait() -> None:
    circuit = opened()
    for _ in range(50):
        circuit.failed(10.0)
    assert circuit.wait_ms(10.0) == 990.0


def test_the_wait_is_bounded_and_varies() -> None:
    circuit = Circuit(lambda: 1.0, 1)
    now_ms = 0.0
    for _ in range(40):
        assert circuit.admit(now_ms)
        circuit.failed(now_ms)
        now_ms += circuit.wait_ms(now_ms)
    circuit.admit(now_ms)
    circuit.failed(now_ms)
    assert abs(circuit.wait_ms(now_ms) - CAP_MS * 1.2) < 1e-3


def test_a_probe_that_says_nothing_lets_another_one_try() -> None:
    circuit = opened()
    assert circuit.admit(1_000.0)
    circuit.given_up()
    assert circuit.admit(1_000.0)


@pytest.mark.parametrize("end", ["succeeded", "failed", "given up"])
def test_the_end_of_a_probe_is_told_to_all_who_wait_for_it(end: str) -> None:
    """They wait without a time: a probe has none."""
    heard: list[str] = []
    circuit = opened()
    circuit.hearers |= {lambda: heard.append("one"), lambda: heard.append("other")}
    assert circuit.admit(1_000.0) and heard == []
    if end == "succeeded":
        circuit.succeeded()
    elif end == "failed":
        circuit.failed(1_500.0)
    else:
        circuit.given_up()
    assert sorted(heard) == ["one", "other"]


def test_all_topics_of_a_host_have_one_bound() -> None:
    """The one that ends makes room for a topic that waits, whatever its own end says."""
    host = Host(Circuit(lambda: 0.0))
    one, other = (Receiver(host, Circuit(lambda: 0.0)) for _ in range(2))
    heard: list[str] = []
    other.hear(lambda: heard.append("room"))
    half = MOST_OF_HOST // 2
    assert sum(one.admit(0.0) for _ in range(MOST_OF_HOST)) == half, "it leaves as many to the others"
    assert sum(other.admit(0.0) for _ in range(MOST_OF_HOST)) == half // 2 and not other.free and heard == []
    third = Receiver(host, Circuit(lambda: 0.0))
    assert third.free and third.admit(0.0), "two that hang leave something to a third"
    third.unanswered(0.0, reached=False)
    for _ in range(half // 2):
        one.answered(0.0, works=True)
    assert heard and other.free and other.admit(0.0)
    other.given_up(probing=False)
    assert other.free == (host.free - half // 2 + 1) // 2


def test_a_circuit_to_which_nothing_wants_to_go_holds_nothing_up() -> None:
    circuit = opened()
    assert circuit.open and circuit.holds_up(1_000.0)
    assert not circuit.holds_up(1_000.0 + CAP_MS), "its last message was cancelled, say"
    assert circuit.admit(1_000.0 + CAP_MS) and circuit.holds_up(1_000.0 + CAP_MS)
