"""Standard output that nobody reads, or that cannot be written: how a command ends, and what it says of its work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.conftest import TIMELINE, Call, plain_environment


@pytest.mark.slow
def test_output_that_nobody_reads_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*TIMELINE, "check-store", "--list"],
            stdout=closed, stderr=subprocess.PIPE, env=plain_environment(),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.processes
def test_what_nobody_reads_any_more_goes_back(tell: Call, topic: str, address: str) -> None:
    assert tell("produce", topic, "x", "--in", "0s", "--id", "unread").code == 0
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*TIMELINE, "consume", topic, "--count", "1", "--lease", "1h"],
            stdout=closed, stderr=subprocess.PIPE, env=plain_environment() | {"TIMELINE_ADDRESS": address},
        )  # fmt: skip
    assert done.returncode == 1
    assert tell("consume", topic, "--count", "1", "--json").json[0]["id"] == "unread"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["version", "--help", "", "check-store --list"])
def test_output_that_cannot_be_written_is_told_once_and_is_no_refusal(arguments: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*TIMELINE, *arguments.split()],
            stdout=full, stderr=subprocess.PIPE, env=plain_environment() | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(b"timeline: standard output cannot be written: No space left on device. ")
    assert done.stderr.count(b"\n") == 1 and b"may have been done" in done.stderr


@pytest.mark.processes
def test_what_was_done_is_not_called_refused_where_its_report_cannot_be_written(
    tell: Call, topic: str, address: str
) -> None:
    def told_to_a_full_disk(*arguments: str, given: bytes = b"") -> str:
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*TIMELINE, *arguments], input=given, stdout=full, stderr=subprocess.PIPE, timeout=60,
                env=plain_environment() | {"TIMELINE_ADDRESS": address, "PYTHONUNBUFFERED": ""},
            )  # fmt: skip
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done
        return done.stderr.decode()

    assert "may have been done" in told_to_a_full_disk("produce", topic, "x", "--in", "0s", "--id", "once")
    told_to_a_full_disk("produce", topic, "--lines", "--json", "--in", "1h", given=b"a line\n")
    told_to_a_full_disk("consume", topic, "--count", "1", "--lease", "1h")
    assert len(tell("ls", topic, "--json").json) == 2
    assert tell("consume", topic, "--count", "1", "--json").json[0]["id"] == "once"  # it went back
    told_to_a_full_disk("topic", "drop", topic, "--yes")
    assert tell("topic", "show", topic).code == 4


@pytest.mark.processes
def test_doctor_of_whom_nobody_reads_on_leaves_nothing_behind(address: str) -> None:
    """What breaks off while its client is open: the client is closed all the same, in order."""
    program = (
        "from timeline.cli import app\nfrom timeline.cli.look import doctor\n"
        "def tell(finding, as_json):\n"
        "    if finding.about == 'broker': raise SystemExit(1)  # as rich does then\n"
        "doctor._tell = tell\n"
        "app.run(['doctor'])"
    )
    environment = plain_environment() | {"TIMELINE_ADDRESS": address}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
