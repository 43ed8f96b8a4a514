"""The client: where everything begins."""

from __future__ import annotations

import random as randomness
import weakref
from collections.abc import Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import NoReturn, Self, TypeAlias

from timeline.clock import Clock
from timeline.credentials import PLAIN, Credentials, credentials_of
from timeline.driver.consume.holding import Holding
from timeline.driver.consume.in_flight import check_credit
from timeline.driver.consumer import CREDIT_BYTES, MAX_CREDIT, Consumer
from timeline.driver.message import Randomness, encode_text
from timeline.driver.producer import Producer
from timeline.driver.queries import Queries
from timeline.driver.tasks import all_of
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport import relay
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, parse_addresses
from timeline.driver.transport.channel import Channel, TransportFactory
from timeline.driver.transport.client_context import ClientContext
from timeline.model import DEFAULT_GROUP, MAX_GROUP_BYTES, MAX_HOLDER_BYTES, check_topic_name
from timeline.wire import Transport

DEFAULT_TIMEOUT = "5s"
MAX_CREDIT_BYTES = 16 * 1024 * 1024 * 1024
Name: TypeAlias = str | PathLike[str]


def connect(
    addresses: str | Sequence[str] = DEFAULT_ADDRESS,
    timeout: Duration = DEFAULT_TIMEOUT,
    *,
    tls: bool | None = None,
    ca: Name | None = None,
    cert: Name | None = None,
    key: Name | None = None,
    token: Name | None = None,
    as_operator: bool = False,
) -> Timeline:
    """A client of the brokers at `addresses` ("host:port", several comma-separated). Opens on first use.

    `timeout`: how long each call may take unless it says otherwise. Raises Invalid for what is no address.

    `tls=True`: connections are encrypted, and brokers show a certificate that this machine trusts; `ca`: a PEM file
    with the authorities that signed it, instead. `cert`, `key`: PEM files with a certificate of our own and its key,
    for brokers that ask for one. `token`: who we are to brokers that ask for a token; a `Path` is a file that has it.
    Files are read again for each connection. `as_operator`: move, cancel, revive and purge whatever group's messages,
    which takes the right `operator` and is logged. Raises Invalid for files that cannot be used.

        async with timeline.connect("localhost:9000") as tl:
            await tl.create_topic("departures", lease="30s")
    """
    return Timeline(addresses, timeout, credentials=credentials_of(tls, ca, cert, key, token, as_operator))


def _grpc(credentials: Credentials, address: str) -> Transport:
    if relay.needed():
        return relay.RelayTransport(address, credentials)
    # Imported on first use: `import timeline` stays quick, and a process that forks before it need not relay.
    from timeline.driver.transport.grpc_transport import GrpcTransport

    return GrpcTransport(address, credentials)


class Timeline(Queries):
    """A client: makes producers and consumers, creates topics, reads. For one event loop; after a fork, or in a new
    loop once its own has ended, it connects anew. Close it with `async with` or `await tl.aclose()`.

    `credentials`: see `connect`. `transport_factory`, `clock` and `random` are for those who carry frames another way,
    or own the time.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        timeout: Duration = DEFAULT_TIMEOUT,
        *,
        credentials: Credentials = PLAIN,
        transport_factory: TransportFactory | None = None,
        clock: Clock | None = None,
        random: Randomness | None = None,
    ) -> None:
        clock = clock or Clock()
        # The system's randomness: a forked child does not draw what its parent draws.
        random = random or randomness.SystemRandom()
        channel = Channel(parse_addresses(addresses), transport_factory or partial(_grpc, credentials), clock, random)
        self._context = ClientContext(channel, clock, random, float(duration_ms(timeout, "timeout", least_ms=1)))
        self._children: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise TypeError("this client is for `async with`; timeline.connect_sync makes the one for `with`")

    def __exit__(self, *_: object) -> None:
        """There for `__enter__`, which tells."""

    async def aclose(self) -> None:
        """Closes its producers and consumers, which flush, all at once; then all connections."""
        if self._context.closed:
            return
        try:
            await all_of(*(child.aclose() for child in list(self._children)), self._context.parted())
        finally:
            self._context.closed = True
            await self._context.channel.close()

    def producer(self, topic: str, group: str = DEFAULT_GROUP) -> Producer:
        """A producer for `topic` in the name of `group`, which owns what it puts. See `Producer`."""
        group = encode_text(group, "a group", MAX_GROUP_BYTES)
        made = Producer(self._context, check_topic_name(topic), group)
        self._children.add(made)
        return made

    def consumer(
        self,
        topic: str,
        id: str | None = None,
        lease: Duration | None = None,
        credit: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Consumer:
        """A consumer of `topic`. See `Consumer`.

        `id`: its own name, kept across restarts: what it still holds comes back to it (None: one is made). `lease`: how
        long it has for each message (None: the topic's). `credit`: how many messages it may have in hand (None: 100, or
        twice the concurrency of `run`), `credit_bytes`: how many bytes of them.
        """
        made = Consumer(
            self._context,
            check_topic_name(topic),
            None if id is None else encode_text(id, "a consumer's id", MAX_HOLDER_BYTES),
            0 if lease is None else duration_ms(lease, "lease", least_ms=1),
            None if credit is None else check_credit(credit, "credit", MAX_CREDIT),
            check_credit(credit_bytes, "credit_bytes", MAX_CREDIT_BYTES),
        )
        self._children.add(made)
        return made

    def holding(self, topic: str, holder: str, lease: Duration | None = None) -> Holding:
        """A holder that takes and settles in bulk on behalf of something else. See `Holding`. `lease`: how long it has
        (None: the topic's)."""
        name = encode_text(holder, "a holder", MAX_HOLDER_BYTES)
        lease_ms = 0 if lease is None else duration_ms(lease, "lease", least_ms=1)
        return Holding(self._context, check_topic_name(topic), name, lease_ms)
