"""Histories: all processes write down what happened, and a judge reads it.

`record` writes and reads histories. `checker.check` names each promise of the service that a history, or the store's
last state, shows broken. It judges the simulation, the tests with real processes, and the demo.

A *story* is all that callers' histories say of one id. An id may have several lives; each begins with a put. A *course*
is the store's side of one id: the message's state from each change to the next. Nothing in it is guessed.
"""

from timeline.history.checker import Verdict, check
from timeline.history.record import (
    FAIL,
    OK,
    UNKNOWN,
    BadHistory,
    Event,
    History,
    HistoryFile,
    outcome_of,
    read_history,
    read_lines,
)
from timeline.history.story import Violation

__all__ = [
    "FAIL",
    "OK",
    "UNKNOWN",
    "BadHistory",
    "Event",
    "History",
    "HistoryFile",
    "Verdict",
    "Violation",
    "check",
    "outcome_of",
    "read_history",
    "read_lines",
]
