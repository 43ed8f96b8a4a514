"""The table of rights: who may do what, asked of all pairs of right and deed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from timeline.broker.api.access import ANYBODY, KNOWN_MOST, METHODS_OF_CLIENTS, RIGHTS, Deed, Principal, Right
from timeline.wire import METHODS


def bearer(*rights: Right, topics: tuple[str, ...] = ("*",), groups: tuple[str, ...] = ("*",)) -> Principal:
    return Principal("t", "1", frozenset(rights), topics, groups)


@pytest.mark.parametrize(("right", "deed"), list(itertools.product(Right, Deed)))
def test_each_right_permits_its_deeds_and_no_others(right: Right, deed: Deed) -> None:
    allowed = {
        Right.PRODUCE: {Deed.PUT, Deed.CHANGE, Deed.SEE},
        Right.CONSUME: {Deed.CONSUME, Deed.SEE, Deed.READ},
        Right.ADMIN: {Deed.GOVERN, Deed.SEE},
        Right.OPERATOR: {Deed.CHANGE_ANY, Deed.SEE, Deed.READ},
        Right.SCHEDULE: {Deed.SCHEDULE, Deed.SEE},
        Right.BROKER: {Deed.PEER},
    }[right]
    why = bearer(right).refusal(deed, "orders")
    assert bool(why) is (deed not in allowed)
    assert not why or ("token 't'" in why and right in why and all(needed in why for needed in RIGHTS[deed]))


@pytest.mark.parametrize("deed", Deed)
def test_nobody_writes_into_internal_topics_and_operators_read_them(deed: Deed) -> None:
    reads = deed in (Deed.SEE, Deed.READ)
    everything = frozenset(Right)
    for caller, permitted in (
        (ANYBODY, reads),
        (bearer(*everything), reads),
        (bearer(*(everything - {Right.OPERATOR})), False),
        (bearer(Right.OPERATOR, topics=("orders",)), False),
    ):
        assert (not caller.refusal(deed, "~schedules")) is permitted, caller
    assert bool(replace(bearer(Right.OPERATOR), as_operator=True).change_refusal("~schedules", "~schedules"))


def test_internal_topics_are_listed_for_those_who_ask() -> None:
    operator, other = bearer(Right.OPERATOR), bearer(Right.PRODUCE)
    for caller, listed in ((ANYBODY, True), (operator, True), (other, False)):
        assert not caller.lists("~schedules", "")
        assert not caller.lists("~schedules", "orders")
        assert caller.lists("~schedules", "~") is listed
        assert caller.lists("orders", "")


def test_every_deed_has_its_rights() -> None:
    assert set(RIGHTS) == set(Deed)
    assert all(RIGHTS.values())


@pytest.mark.parametrize(
    ("topic", "group", "named"),
    [
        ("orders-eu", "web", ""),
        ("orders-eu", "app-1", ""),
        ("payments", "web", "its topics are orders*, refunds"),
        ("Orders-eu", "web", "its topics are"),
        ("orders-eu", "ops", "its groups are web, app-?"),
        ("orders-eu", "app-10", "its groups are"),
    ],
)
def test_topics_and_groups_are_globs(topic: str, group: str, named: str) -> None:
    caller = bearer(Right.PRODUCE, topics=("orders*", "refunds"), groups=("web", "app-?"))
    for _ in range(2):  # the second answer is remembered
        why = caller.refusal(Deed.PUT, topic, group)
        assert named in why
        assert bool(why) is bool(named)


def test_an_operator_acts_for_any_group_only_when_it_says_so() -> None:
    identity = Principal("ops", "1", frozenset({Right.OPERATOR}), ("orders*",), ("ops",))
    assert "needs the right produce" in identity.change_refusal("orders", "ops")
    assert "As an operator it may: add --as-operator" in identity.change_refusal("orders", "ops")
    assert "--as-operator" not in identity.change_refusal("payments", "ops")
    assert not replace(identity, as_operator=True).change_refusal("orders", "web")
    assert "its topics are" in replace(identity, as_operator=True).change_refusal("payments", "web")
    plain = Principal("web", "2", frozenset({Right.PRODUCE}), as_operator=True)
    assert "--as-operator" in plain.call_refusal("Mutate")


def test_methods_that_are_no_clients_are_brokers_alone() -> None:
    assert set(METHODS) >= METHODS_OF_CLIENTS
    everything = bearer(Right.PRODUCE, Right.CONSUME, Right.ADMIN, Right.OPERATOR)
    for method in METHODS_OF_CLIENTS:
        assert not everything.call_refusal(method)
    assert "needs the right broker" in everything.call_refusal("SomethingBetweenBrokers")
    assert not bearer(Right.BROKER).call_refusal("SomethingBetweenBrokers")


def test_nobody_is_asked_where_no_tokens_are() -> None:
    assert not any(ANYBODY.refusal(deed, "orders", "web") for deed in Deed)
    assert not ANYBODY.call_refusal("SomethingBetweenBrokers")


def test_what_is_remembered_is_bounded() -> None:
    caller = bearer(Right.PRODUCE, topics=("orders",))
    for number in range(3 * KNOWN_MOST):
        assert caller.refusal(Deed.PUT, f"made-up-{number}", "g")
    assert len(caller._known) <= KNOWN_MOST
    assert not caller.refusal(Deed.PUT, "orders", "g")
