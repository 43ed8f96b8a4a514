"""What happened, written down by every process, and the judge that reads it.

`record` writes and reads histories. `checker.check` names each promise of the service that a history and the store's
last state show broken; it judges the simulation, the tests with real processes, and the demo.

A *story* is all that callers' histories say of one id. An id may have several lives; each begins with a put. A *course*
is what the store's own side says of one id: the message's state from each change to the next, where nothing has to be
guessed.
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
