"""What happened, written down by every process, and the judge that reads it.

`record` writes and reads histories; `checker.check` names each promise of the service that a history and the store's
last state show broken. The same checker judges the simulation, the tests with real processes, and the demo.
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
