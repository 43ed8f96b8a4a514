"""A long history is judged a message at a time: what is asked of one id looks at that id's events only."""

from __future__ import annotations

import pytest

from tests.history.scene import Scene
from timeline.history import story as stories


@pytest.mark.slow
def test_each_event_is_filed_under_one_id_and_looked_at_there() -> None:
    scene = Scene()
    for number in range(2_000):
        id = f"id{number}"
        scene.put(id=id, sum=number, due=scene.at)
        scene.receive(id=id, birth=number, sum=number, due=scene.at - 2)
        scene.settle("ack", id=id, birth=number)
    assert scene.judge().holds, scene.judge(most=2).summary()
    found = stories.sort_out(scene.events, [], stories.Declared())
    assert len(found) == 2_000
    assert {len(story.puts) + len(story.receives) + len(story.settles) for story in found} == {3}
