"""Statements as data, and plans: a store's logic, which yields statements and receives what they answer. No I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Statement:
    """`values`: its parameters. `read`: what becomes of the rows that it answers; None: nobody needs an answer, so that
    it may be sent together with the next one. `counts`: its answer is how many rows it changed. `writes`: it may change
    something."""

    text: str
    values: Sequence[Any] = ()
    read: Callable[[Any], Any] | None = None
    counts: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Atomic:
    """A plan, made by `plan`, whose statements commit together; a driver may do it again. `single`: it has one
    statement that changes anything."""

    plan: Callable[[], Plan[Any]]
    single: bool = False


Asked: TypeAlias = Statement | Atomic | tuple[Statement, ...]
"""What a plan yields. Statements of one tuple may go in one exchange with the server; it receives all their answers."""
Plan: TypeAlias = Generator[Asked, Any, Result]


class Query:
    """A statement under construction, for rows of the topic `key`: calling it takes up a value, and returns what stands
    for it in the text. Values are taken up in the order of the text."""

    __slots__ = ("_key", "_values")

    def __init__(self, key: int = 0) -> None:
        self._key = key
        self._values: list[Any] = []

    def __call__(self, value: Any) -> str:
        self._values.append(value)
        return "?"

    @property
    def topic(self) -> str:
        """The comparison with the rows' topic."""
        return f"= {self(self._key)}"

    def reading(self, text: str, read: Callable[[Any], Any]) -> Statement:
        """A statement that only reads."""
        return Statement(text, tuple(self._values), read)

    def rows(self, text: str) -> Statement:
        """A statement that answers its rows."""
        return self.reading(text, list)

    def changing(self, text: str) -> Statement:
        """A statement that answers how many rows it changed."""
        return Statement(text, tuple(self._values), counts=True, writes=True)

    def running(self, text: str) -> Statement:
        """A statement that changes something, and whose answer nobody needs."""
        return Statement(text, tuple(self._values), writes=True)


def drive(plan: Plan[Result], answer: Callable[[Sequence[Statement]], list[Any]]) -> Result:
    """Run a plan where everything that happens until the commit is one transaction already."""
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
    """Run a plan whose statements are answered by `answer`, and those that commit together by `atomic`."""
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
