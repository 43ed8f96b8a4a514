"""What the commands of `timeline pipeline` take and say, apart from what their jobs do."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import click
import pytest

from tests.security.guarded import Tokens
from tests.services import require_service
from timeline.cli.app import run
from timeline.cli.data.pipeline import ours, pipeline, pipeline_command
from timeline.pipeline.connection import IDENTITY, identity


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IDENTITY:
        monkeypatch.delenv(f"TIMELINE_{name}", raising=False)


@pytest.mark.parametrize("name", sorted(pipeline.commands))
def test_each_command_takes_what_all_clients_take(name: str) -> None:
    known = {option for parameter in pipeline.commands[name].params for option in parameter.opts}
    assert {"--address", "--tls", "--tls-ca", "--tls-cert", "--tls-key", "--token-file"} <= known


def test_a_token_file_that_an_option_names_is_what_workers_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text(Tokens(tmp_path).add("spark", "admin"))
    monkeypatch.chdir(tmp_path)
    found = []

    @click.command()
    @pipeline_command
    def asked(_job: object, **given: object) -> None:
        assert "token_file" not in given
        found.append((identity(), os.environ["TIMELINE_TOKEN_FILE"]))

    asked.main(["--token-file", "mine"], standalone_mode=False)
    ((shown, variable),) = found
    assert shown.metadata() and variable == str(tmp_path / "mine")
    assert "TIMELINE_TOKEN_FILE" not in os.environ, "it is of this command only"


def test_a_token_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pipeline", "backup", "jobs", "file:///nowhere", "--token-file", "/nowhere/token"]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_a_refusal_of_rows_names_the_options_of_source_and_command() -> None:
    require_service("spark")
    from timeline.pipeline.source.options import SourceOptions
    from timeline.pipeline.source.writing import WriteCounts, too_many

    done = WriteCounts(
        rejected=Counter({"FORBIDDEN: the message belongs to another group": 2}), examples=[("id=a", "so")]
    )
    said = too_many(done, SourceOptions("b:1", "t"))
    pages = f"Job aborted: Traceback\n  File x\ntimeline.errors.Invalid: INVALID: {said}\n\tat org.apache.spark.X"
    kind, told = ours(RuntimeError(pages))
    assert kind == "Invalid" and "more than maxRejects=0 (--max-rejects)" in told
    assert "rejectsPath (--rejects URL) keeps them" in told and "2 × FORBIDDEN" in told
