"""Structured logs: whatever a broker's process has to say goes one way, in one form."""

from __future__ import annotations

import json
import logging

import pytest

from timeline import logs


def test_what_gRPC_and_the_loop_warn_of_is_said_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("info", "json")
    logging.getLogger("timeline.broker").info("ready", extra={"port": 9000})
    for name in ("asyncio", "grpc._cython.cygrpc"):
        logging.getLogger(name).info("nothing that an operator asked for")
        try:
            raise ValueError("seven")
        except ValueError:
            logging.getLogger(name).exception("it stumbled")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["event"]) for line in lines] == [
        ("timeline.broker", "ready"), ("asyncio", "it stumbled"), ("grpc._cython.cygrpc", "it stumbled"),
    ]  # fmt: skip
    assert lines[0]["port"] == 9000 and "ValueError: seven" in lines[1]["error"]


def test_lines_for_people_carry_the_fields_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("warning", "text")
    logging.getLogger("timeline").info("not asked for")
    try:
        raise OSError("no space left")
    except OSError:
        logging.getLogger("timeline").exception("cannot write", extra={"file": "a.db"})
    said = capsys.readouterr().err
    assert "not asked for" not in said
    assert "error   cannot write file=a.db\nTraceback" in said and said.endswith("OSError: no space left\n")


def test_logs_are_one_object_a_line_with_their_fields() -> None:
    record = logging.makeLogRecord({"msg": "ready", "levelno": 20, "levelname": "INFO", "name": "timeline", "port": 1})
    line = json.loads(logs.JsonLines().format(record))
    assert (line["event"], line["level"], line["port"]) == ("ready", "info", 1)
    assert logs.TextLines().format(record).endswith("ready port=1")
