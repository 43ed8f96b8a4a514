"""The client, which makes everything else."""

from __future__ import annotations

import random as randomness
import weakref
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import NoReturn, TypeAlias

from timeline.clock import Clock
from timeline.credentials import PLAIN, Credentials, credentials_of
from timeline.driver.consume.holding import Holding
from timeline.driver.consume.in_flight import check_credit
from timeline.driver.consume.pull import BrokersMet, Pulling
from timeline.driver.consumer import CREDIT_BYTES, MAX_CREDIT, Consumer
from timeline.driver.message import Randomness, encode_text
from timeline.driver.producer import Producer
from timeline.driver.queries import Queries
from timeline.driver.schedules import Scheduling
from timeline.driver.tasks import Closing, SharedClose, all_of
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport import relay
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, parse_addresses
from timeline.driver.transport.channel import Channel, ClientContext, TransportFactory
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
    """Return a client of the brokers at `addresses` ("host:port", several separated by commas). It opens on first use.

    `timeout`: how long a call may take by default. `tls=True`: encrypt connections, and require a certificate that this
    machine trusts. `ca`: a PEM file of the authorities to trust instead. `cert`, `key`: PEM files of the client's own
    certificate and key, if brokers ask for one. `token`: the token, if brokers ask for one; a `Path` is a file with it.
    Files are read again for each connection.

    `as_operator`: move, cancel, revive and purge messages of all groups. This takes the right `operator`, and is
    logged. Raise Invalid for a wrong address and for files that cannot be used.

        async with timeline.connect("localhost:9000") as tl:
            await tl.create_topic("departures", lease="30s")
    """
    return Timeline(addresses, timeout, credentials=credentials_of(tls, ca, cert, key, token, as_operator))


def _grpc(credentials: Credentials, address: str) -> Transport:
    if relay.needed():
        return relay.RelayTransport(address, credentials)
    # Imported on first use: `import timeline` stays quick, and a process that forks before needs no relay.
    from timeline.driver.transport.grpc_transport import GrpcTransport

    return GrpcTransport(address, credentials)


class Timeline(Queries, Scheduling, Pulling, Closing):
    """A client: it makes producers and consumers, manages topics and schedules, and reads. Close it with
    `async with` or `await tl.aclose()`.

    It belongs to one event loop. It connects again after a fork, and in a new loop once its own has ended.
    `credentials`: see `connect`. `transport_factory`, `clock` and `random`: for another transport, and for simulations.
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
        # The system's randomness: a forked child must not draw the same as its parent.
        random = random or randomness.SystemRandom()
        channel = Channel(parse_addresses(addresses), transport_factory or partial(_grpc, credentials), clock, random)
        self._context = ClientContext(channel, clock, random, float(duration_ms(timeout, "timeout", least_ms=1)))
        self._brokers = BrokersMet()
        self._children: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()
        self._closing = SharedClose()

    def __repr__(self) -> str:
        return f"Timeline({','.join(self._context.channel.addresses)})"

    def __enter__(self) -> NoReturn:
        raise TypeError("this client is for `async with`; timeline.connect_sync makes the one for `with`")

    def __exit__(self, *_: object) -> None:
        """Needed, so that `with` calls `__enter__`, which raises."""

    async def aclose(self) -> None:
        """Close its producers and consumers at once, which flush, and then all connections. A second call waits for the
        first."""
        if not self._context.elsewhere:
            await self._closing.run(self._close)
        elif not self._context.closed:
            self._context.leave_all_behind()
            await self._close()

    async def _close(self) -> None:
        try:
            await all_of(*(child.aclose() for child in list(self._children)), self._context.parted())
        finally:
            self._context.closed = True
            await self._context.channel.close()

    def producer(self, topic: str, group: str = DEFAULT_GROUP) -> Producer:
        """Return a producer for `topic`. `group` owns its messages. See `Producer`."""
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
        """Return a consumer of `topic`. See `Consumer`.

        `id`: its name (default: one is made). If you keep it across restarts, its leased messages come back to it.
        `lease`: the time for each message (default: the topic's). `credit`: the most messages in flight (default: 100;
        `run` fits it to the speed of its handlers). `credit_bytes`: the most bytes of them.
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
        """Return a holder, which leases and settles in bulk for another system. See `Holding`. `lease`: the time for
        each message (default: the topic's)."""
        name = encode_text(holder, "a holder", MAX_HOLDER_BYTES)
        lease_ms = 0 if lease is None else duration_ms(lease, "lease", least_ms=1)
        return Holding(self._context, check_topic_name(topic), name, lease_ms)
