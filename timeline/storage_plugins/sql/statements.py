"""Statements as data, and plans: the logic of a store, which yields statements and receives their answers. No I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Statement:
    """`values`: its parameters. `read`: makes the answer of its rows; None: it has no answer, and may be sent together
    with the next one. `counts`: its answer is the number of changed rows. `writes`: it may change something."""

    text: str
    values: Sequence[Any] = ()
    read: Callable[[Any], Any] | None = None
    counts: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Atomic:
    """A plan, made by `plan`, whose statements commit together. A driver may repeat it. `single`: only one statement
    changes anything."""

    plan: Callable[[], Plan[Any]]
    single: bool = False


Asked: TypeAlias = Statement | Atomic | tuple[Statement, ...]
"""The values that a plan yields. Statements of one tuple may go in one exchange; the plan receives all their
answers."""
Plan: TypeAlias = Generator[Asked, Any, Result]


class Query:
    """A statement under construction, for rows of the topic `key`. A call adds a value, and returns its placeholder.
    Values are added in the order of the text."""

    __slots__ = ("_key", "_values")

    def __init__(self, key: int = 0) -> None:
        self._key = key
        self._values: list[Any] = []

    def __call__(self, value: Any) -> str:
        self._values.append(value)
        return "?"

    @property
    def topic(self) -> str:
        """Return the comparison with the rows' topic."""
        return f"= {self(self._key)}"

    def reading(self, text: str, read: Callable[[Any], Any]) -> Statement:
        """Return a statement that only reads."""
        return Statement(text, tuple(self._values), read)

    def rows(self, text: str) -> Statement:
        """Return a statement whose answer is its rows."""
        return self.reading(text, list)

    def running(self, text: str) -> Statement:
        """Return a statement that changes something and has no answer."""
        return Statement(text, tuple(self._values), writes=True)


def drive(plan: Plan[Result], answer: Callable[[Sequence[Statement]], list[Any]]) -> Result:
    """Run a plan inside a transaction, so that all its statements commit together."""
    answered: Any = None
    while True:
        try:
            asked = plan.send(answered)
        except StopIteration as done:
            result: Result = done.value
            return result
        if isinstance(asked, Statement):
            (answered,) = answer((asked,))
        elif isinstance(asked, Atomic):
            answered = drive(asked.plan(), answer)
        else:
            answered = answer(asked)


async def drive_async(
    plan: Plan[Result], answer: Callable[[Statement], Awaitable[Any]], atomic: Callable[[Atomic], Awaitable[Any]]
) -> Result:
    """Run a plan: single statements by `answer`, and those that commit together by `atomic`."""
    answered: Any = None
    while True:
        try:
            asked = plan.send(answered)
        except StopIteration as done:
            result: Result = done.value
            return result
        if isinstance(asked, Statement):
            answered = await answer(asked)
        elif isinstance(asked, Atomic):
            answered = await atomic(asked)
        else:
            answered = [await answer(statement) for statement in asked]
