"""What a broker believes, and what follows from it."""

from __future__ import annotations

import pytest

from timeline.sync import Member
from timeline.sync import view as view_module
from timeline.sync.view import View

B1, B2, B3 = (Member(f"b{number}", f"10.0.0.{number}:9000") for number in (1, 2, 3))


def joined() -> View:
    view = View()
    view.join(B1)
    return view


def test_what_others_say_of_this_broker_does_not_count() -> None:
    view = joined()
    assert not view.learn([Member("b1", "elsewhere:1")], {7: {"b1": 5}})
    assert view.members() == (B1,) and not view.hosting(7)


def test_consumers_of_brokers_that_are_not_there_do_not_count() -> None:
    view = joined()
    assert view.learn([B2], {7: {"b2": 1, "b3": 4}, 8: {"b3": 1}})
    assert view.hosting(7) == {"b2": 1} and not view.hosting(8)
    assert {view.owner(7, bucket, 16) for bucket in range(16)} == {B2}


def test_what_is_told_twice_is_no_news() -> None:
    view = joined()
    assert view.learn([B2], {7: {"b2": 1}}) and not view.learn([B2], {7: {"b2": 1}, 9: {"b2": 0}})
    assert view.host(7, 2) and not view.host(7, 2) and not view.host(8, 0)


def test_what_is_said_before_its_broker_is_there_counts_once_it_is() -> None:
    view, hosting = joined(), {7: {"b2": 1}}
    view.learn([B3], hosting)
    assert not view.hosting(7)
    assert view.learn([B2, B3], hosting) and view.hosting(7) == {"b2": 1}
    assert view.learn([B3], hosting) and not view.hosting(7)


def test_nothing_is_reckoned_again_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    reckon = view_module.assign

    def counted(topic_uid, buckets, weights):  # type: ignore[no-untyped-def]
        asked.append(topic_uid)
        return reckon(topic_uid, buckets, weights)

    monkeypatch.setattr(view_module, "assign", counted)
    view = joined()
    for uid in (7, 8):
        view.host(uid, 1)
    view.learn([B2, B3], {7: {"b2": 1}, 8: {"b3": 1}})
    for _ in range(3):
        assert {view.owner(7, bucket, 64) for bucket in range(64)} == {B1, B2}
        assert view.buckets(7, 64) and view.buckets(8, 64)
    assert sorted(asked) == [7, 8]
    view.learn([B2, B3], {7: {"b2": 2}, 8: {"b3": 1}})
    assert view.buckets(7, 64) and view.buckets(8, 64)
    assert sorted(asked) == [7, 7, 8]


def test_who_leaves_deals_nothing_any_more() -> None:
    view = joined()
    view.host(7, 1)
    view.learn([B2], {7: {"b2": 1}})
    assert view.buckets(7, 64)
    view.join(None)
    assert view.buckets(7, 64) == () and view.owner(7, 0, 64) == B2 and view.members() == (B2,)
    revision = view.revision
    view.learn([], {})
    assert view.owner(7, 0, 64) is None and view.revision > revision
