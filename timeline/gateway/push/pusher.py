"""Pushes topics that have a `push_url`: takes what is due, sends it, and settles it by the answer.

    Pusher ─ one TopicPusher per topic ─▶ take (as many as may be under way) ─▶ Sender ─▶ settlement ─▶ settle

A message is taken only when its request can go at once. So nothing waits here. A receiver that is down costs no
deliveries: while its circuit is open, only the probe is taken. What comes to takes from before goes back unseen.

While messages come, several takes wait at once. A broker leases one message per waiting take ahead of its due time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import getrandbits, random

import timeline
from timeline.clock import Clock
from timeline.credentials import BadCredentials, Credentials
from timeline.driver.consume.pull import PulledDelivery
from timeline.errors import Expired, Forbidden, Invalid, NotFound, Throttled, TimelineError, Unavailable, Unknown
from timeline.gateway.metrics import GatewayMetrics
from timeline.gateway.push.addresses import AddressGuard, host_of
from timeline.gateway.push.circuit import Circuit, Host, Receiver
from timeline.gateway.push.request import PushedMessage, headers_of
from timeline.gateway.push.sender import Sender, Unanswered
from timeline.gateway.push.settlement import Settlement, Verb, settlement_of, unanswered
from timeline.gateway.requests import ENDING_WAIT_S
from timeline.model import Topic
from timeline.wording import shown_duration

log = logging.getLogger("timeline.gateway.push")

LEASE_MARGIN_MS = 10_000
"""How much longer a lease lasts than the receiver may take: for the settle, and one look-up."""
TAKE_WAIT = "20s"
TAKE_MOST = 1_000
TAKES = 4
"""Takes that wait at once while messages come. An idle topic has one."""
LOOK_MS = 5_000.0
"""How often the topics and their secrets are read again. A former secret stays valid for a day."""
PAYLOAD_BYTES = 64 * 1024 * 1024
"""Payloads under way of all topics together. Each is there about three times."""
NO_TOKEN = "brokers ask for a token: give --push-token-file, of one with the rights admin and consume"
UNSETTLED = "unsettled"
"""The effect of a webhook whose answer could not be recorded: the message may come again."""
PAUSE_MS = 1_000.0
"""The pause after a call that failed."""


class Acks:
    """Acknowledges in groups: while one call is under way, the next group forms."""

    def __init__(self, client: timeline.Timeline) -> None:
        self._client = client
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ack(self, receipt: str) -> None:
        """Acknowledge one message. Raise TimelineError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((receipt, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(), name="acks of webhooks")
        await done

    async def _send(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                receipts = await self._client.settle([receipt for receipt, _ in group], "ack")
            except TimelineError as error:
                for _, done in group:
                    _end(done, error)
                continue
            except Exception as error:  # the fault is ours, and nobody may wait for ever
                for _, done in group + self._waiting:
                    _end(done, error)
                self._waiting.clear()
                return
            for (_, done), receipt in zip(group, receipts, strict=True):
                try:
                    receipt.raise_failed()
                except TimelineError as error:
                    _end(done, error)
                else:
                    _end(done)


def _end(done: asyncio.Future[None], error: BaseException | None = None) -> None:
    if done.done():
        return  # its task was cancelled
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class PayloadBudget:
    """The bytes of payloads under way of all topics. A topic may take more while it has no more than it leaves to the
    others, and always if it has none. A take that is under way is counted when its messages come."""

    def __init__(self) -> None:
        self._left = PAYLOAD_BYTES
        self._waiting: set[Callable[[], None]] = set()

    def has_room(self, own: int, told: Callable[[], None]) -> bool:
        """Return whether a topic that has `own` bytes under way may take more. If not, call `told` when some ended."""
        if own <= max(0, self._left):
            return True
        self._waiting.add(told)
        return False

    def add(self, count: int) -> None:
        """Count the bytes of a message."""
        self._left -= count

    def remove(self, count: int) -> None:
        """Forget them."""
        self._left += count
        waiting, self._waiting = self._waiting, set()
        for told in waiting:
            told()


class TopicPusher:
    """Pushes one topic until it is stopped."""

    def __init__(
        self,
        client: timeline.Timeline,
        topic: Topic,
        secrets: tuple[str, ...],
        sender: Sender,
        receiver: Receiver,
        payloads: PayloadBudget,
        metrics: GatewayMetrics,
    ) -> None:
        self._client, self.topic, self.secrets, self._payloads = client, topic, secrets, payloads
        self._sender, self.receiver, self._acks, self._metrics = sender, receiver, Acks(client), metrics
        self._clock = Clock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._takers = self._asked = self._bytes = 0
        """Takes that wait, how many messages they ask for, and the bytes of payloads under way."""
        self._stopping = asyncio.Event()
        self._trouble = ""
        """Why the last take failed."""
        self._may_send_ms = 0.0
        """When the next request may go, by the topic's rate (monotonic)."""

    async def run(self) -> None:
        """Take and send until cancelled. Requests under way go on: see `finish`."""
        self.receiver.hear(self._changed.set)
        try:
            async with asyncio.TaskGroup() as takers:
                takers.create_task(self._take_all(takers), name=f"takes of {self.topic.name}")
        finally:
            self.receiver.unhear(self._changed.set)
            self._changed.set()

    async def _take_all(self, takers: asyncio.TaskGroup, lasting: bool = True) -> None:
        """Take and send. `lasting`: while a little room is left, and when nothing comes for a while. The others leave
        both to it. Many small takes would cost more than one."""
        self._takers += 1
        try:
            while True:
                room = await self._room(1 if lasting else self._share)
                if self._stopping.is_set():
                    return
                try:
                    taken = await self._take(room)
                    if self._stopping.is_set():
                        if taken:
                            await self._client.settle([one.receipt for one in taken], "return")
                        return
                except NotFound:
                    return
                except TimelineError as error:
                    if not lasting:
                        return
                    if error.reason != self._trouble:
                        log.warning("nothing can be taken of topic %r: %s", self.topic.name, error.reason)
                    self._trouble = error.reason
                    await asyncio.sleep(PAUSE_MS / 1000.0)
                    continue
                self._trouble = ""
                for delivery in taken:
                    self._start(delivery)
                if taken and self._takers < TAKES:
                    takers.create_task(self._take_all(takers, lasting=False), name=f"takes of {self.topic.name}")
                if not (taken or lasting):
                    return
        finally:
            self._takers -= 1

    @property
    def _share(self) -> int:
        """The most that one take asks for."""
        return min(TAKE_MOST, -(-self.topic.settings.push_concurrency // TAKES))

    async def _room(self, least: int) -> int:
        """Wait until `least` requests may go. Return how many a take may ask for, beside the others."""
        settings = self.topic.settings
        while True:
            now_ms = self._clock.monotonic_ms()
            busy = len(self._under_way) + self._asked
            free = min(settings.push_concurrency - busy, self._share, self.receiver.free)
            wait_ms = self.receiver.wait_ms(now_ms)
            if self.receiver.open:
                free = min(free, 1) if not busy else 0
            if not self._payloads.has_room(self._bytes, self._changed.set):
                free = 0
            if settings.push_rate:
                step_ms = 1000.0 / settings.push_rate
                behind_ms = now_ms - max(self._may_send_ms, now_ms - 1000.0) - self._asked * step_ms
                free = min(free, int(behind_ms / step_ms) + (behind_ms >= 0))
                wait_ms = max(wait_ms, -behind_ms)
            if free >= least and wait_ms <= 0:
                return free
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000.0 if 0 < wait_ms < float("inf") else None):
                    await self._changed.wait()

    async def _take(self, room: int) -> list[PulledDelivery]:
        settings = self.topic.settings
        lease_ms = min(settings.max_lease_ms, settings.push_timeout_ms + LEASE_MARGIN_MS)
        self._asked += room
        try:
            taken = await self._client.take(self.topic.name, room, TAKE_WAIT, lease=lease_ms / 1000.0)
        finally:
            self._asked -= room
            self._changed.set()
        if settings.push_rate and taken:
            now_ms = self._clock.monotonic_ms()
            since_ms = max(self._may_send_ms, now_ms - 1000.0)
            self._may_send_ms = since_ms + len(taken) * 1000.0 / settings.push_rate
        return taken

    def _start(self, delivery: PulledDelivery) -> None:
        task = asyncio.create_task(self._push(delivery), name=f"webhook of {self.topic.name}")
        self._under_way.add(task)
        self._bytes += len(delivery.payload)
        self._payloads.add(len(delivery.payload))
        task.add_done_callback(partial(self._ended, len(delivery.payload)))

    def _ended(self, count: int, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._bytes -= count
        self._payloads.remove(count)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a webhook of topic %r failed", self.topic.name, exc_info=error)

    async def _push(self, delivery: PulledDelivery) -> None:
        began_ms = self._clock.monotonic_ms()
        outcome = await self._post(delivery)
        outcome = outcome.last(delivery.deliveries, self.topic.settings.max_deliveries)
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000.0
        if outcome.verb is Verb.RELEASE or outcome.verb is Verb.BURY:
            # Not the response's body: a receiver may answer with what it got.
            why = outcome.reason.partition("\n")[0] if outcome.status is None else outcome.status
            log.warning("webhook of %r of topic %r: %s. %s", delivery.id, self.topic.name, outcome.verb, why)
        effect = str(outcome.verb) if await self._settled(delivery, outcome) else UNSETTLED
        if outcome.verb is not Verb.RETURN:
            self._metrics.webhook(self.topic.name, effect, took_s)

    async def _settled(self, delivery: PulledDelivery, outcome: Settlement) -> bool:
        """Settle the message, and return whether that is done. Try again while the lease lasts: an answer that cannot
        be recorded makes the message come again."""
        operation_ids = [getrandbits(63) + 1]  # of all tries: a repeat of one whose answer was lost is recognised
        while True:
            try:
                await self._settle(delivery, outcome, operation_ids)
                return True
            except (NotFound, Expired):  # settled, by the receiver or a call whose answer was lost; or it has expired
                return True
            except TimelineError as error:
                lasts = delivery.lease_left_ms > PAUSE_MS
                if lasts and isinstance(error, Unavailable | Unknown | Throttled):
                    await asyncio.sleep(PAUSE_MS / 1000.0)
                    continue
                log.warning("%s of %r of topic %r failed: %s", outcome.verb, delivery.id, self.topic.name, error.reason)
                return False

    async def _post(self, delivery: PulledDelivery) -> Settlement:
        name, settings, receiver = self.topic.name, self.topic.settings, self.receiver
        token = delivery.token
        message = PushedMessage(
            topic=name,
            id=delivery.id,
            birth=token.birth,
            payload=delivery.payload,
            headers=delivery.headers,
            due=delivery.scheduled.isoformat(),
            deliveries=delivery.deliveries,
            receipt=delivery.receipt,
        )
        try:
            headers = headers_of(message, self.secrets, self._clock.now_ms() // 1000)
        except Invalid as bad:
            return Settlement(Verb.RELEASE, bad.reason)
        if not receiver.admit(self._clock.monotonic_ms()):
            return Settlement(Verb.RETURN)
        probing = receiver.open
        try:
            answer = await self._sender.post(headers, message.payload, settings.push_timeout_ms)
            outcome = settlement_of(
                answer.status, answer.headers, answer.body, self._clock.now_ms(), settings.max_lease_ms
            )
        except Unanswered as why:
            outcome = unanswered(str(why))
            receiver.unanswered(self._clock.monotonic_ms(), why.reached)
        except BaseException:  # it was cancelled, or the fault is ours
            receiver.given_up(probing)
            raise
        else:
            receiver.answered(self._clock.monotonic_ms(), works=not outcome.broken)
        if receiver.open and not probing:
            log.warning(
                "webhooks of topic %r wait: the receiver fails. It is tried again, at most a minute apart", name
            )
        elif probing and not receiver.open:
            log.info("webhooks of topic %r go again: the receiver answers", name)
        self._changed.set()
        return outcome

    async def _settle(self, delivery: PulledDelivery, outcome: Settlement, operation_ids: list[int]) -> None:
        settle = partial(self._client.settle, delivery.receipt)
        if outcome.verb is Verb.ACK:
            await self._acks.ack(delivery.receipt)
            return
        if outcome.verb is Verb.RETURN:
            receipts = await settle("return", operation_ids=operation_ids)
        elif outcome.verb is Verb.KEEP:
            receipts = await settle("extend", lease=outcome.lease_ms / 1000.0)
        elif outcome.verb is Verb.BURY:
            receipts = await settle("bury", reason=outcome.reason)
        else:
            asked_ms = outcome.wait_ms
            latest_ms = self.topic.settings.horizon_ms
            wait = delivery.retry_in if asked_ms is None else min(asked_ms, latest_ms) / 1000.0
            receipts = await settle("release", in_=wait, reason=outcome.reason, operation_ids=operation_ids)
        receipts.raise_failed()

    def stop_taking(self) -> None:
        """Begin no take any more. What comes to those under way goes back unseen."""
        self._stopping.set()
        self._changed.set()

    async def finish(self, grace_s: float) -> None:
        """Wait for the requests under way, and close the connections. Requests that are left are cancelled, and their
        leases run out. If this call is cancelled, that happens at once."""
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=grace_s)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)
            await self._sender.close()


class Pusher:
    """Pushes all topics with a `push_url` that `client` may govern and consume. `random`: returns 0 to 1."""

    def __init__(
        self, client: timeline.Timeline, guard: AddressGuard, random: Callable[[], float], metrics: GatewayMetrics
    ) -> None:
        self._client, self._guard, self._random, self._metrics = client, guard, random, metrics
        self._hosts: dict[tuple[str, int], Host] = {}
        self._payloads = PayloadBudget()
        metrics.circuits_open.set_function(self._open_circuits)
        self._running: dict[str, tuple[TopicPusher, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Former pushers whose requests under way are still waited for."""
        self._refused: dict[str, str] = {}
        self._trouble = ""
        self._resting: set[asyncio.Future[None]] = set()
        self._rested_s: float | None = None
        """Since when nothing is taken any more (the loop's time)."""
        self.looked = asyncio.Event()
        """Set after each look at the topics."""

    def _open_circuits(self) -> int:
        now_ms = Clock().monotonic_ms()
        hosts = sum(host.circuit.holds_up(now_ms) for host in self._hosts.values())
        return hosts + sum(pusher.receiver.own_holds_up(now_ms) for pusher, _ in self._running.values())

    async def run(self, grace_s: float = 30.0) -> None:
        """Push until cancelled. Then wait for the requests under way, up to the grace since the last take."""
        try:
            while True:
                try:
                    await self._look()
                    self._trouble = ""
                except TimelineError as error:
                    if error.code != self._trouble:
                        said = NO_TOKEN if isinstance(error, Forbidden | BadCredentials) else error.reason
                        log.warning("the topics to push are not known: %s", said)
                    self._trouble = error.code
                except Exception as bug:  # the webhooks of all topics would end without a word
                    log.error("a look at the topics to push failed", exc_info=bug)
                self.looked.set()
                await asyncio.sleep(LOOK_MS / 1000.0)
        finally:
            rested_s = 0.0 if self._rested_s is None else asyncio.get_running_loop().time() - self._rested_s
            left_s = max(0.0, grace_s - rested_s)
            for name in list(self._running):
                self._stop(name, left_s)
            if self._ending:
                await asyncio.wait(self._ending, timeout=left_s)
            for ending in self._ending:  # of a topic whose push_timeout is longer
                ending.cancel()
            await asyncio.gather(*self._ending, return_exceptions=True)

    async def _look(self) -> None:
        """Start, restart and stop the topics' pushers as their records say now."""
        if self._rested_s is not None:
            return
        standing = {topic.name: topic for topic in await self._client.topics()}
        topics = {name: topic for name, topic in standing.items() if topic.settings.push_url}
        for name in [name for name in self._running if name not in topics]:
            kept = name in standing  # its receiver has the messages under way, and their answers count
            self._stop(name, self._running[name][0].topic.settings.push_timeout_ms / 1000.0 if kept else 0.0)
        used: set[tuple[str, int]] = set()
        for name, topic in topics.items():
            try:
                used.add(host_of(topic.settings.push_url))
                await self._refresh(topic)
                self._refused.pop(name, None)
            except (Forbidden, Invalid, NotFound) as why:
                if self._refused.get(name) != why.reason:
                    log.error("topic %r is not pushed: %s", name, why.reason)
                self._refused[name] = why.reason
        self._hosts = {name: host for name, host in self._hosts.items() if name in used}

    async def _refresh(self, topic: Topic) -> None:
        secrets = await self._client.topic_secrets(topic.name)
        if self._rested_s is not None:
            return
        running = self._running.get(topic.name)
        if running is not None:
            pusher, task = running
            if _connected_alike(pusher.topic, topic) and not task.done():
                pusher.secrets, pusher.topic = secrets, topic
                return
            self._stop(topic.name, pusher.topic.settings.push_timeout_ms / 1000.0)
        settings = topic.settings
        sender = Sender(settings.push_url, self._guard, settings.push_concurrency)
        host = self._hosts.setdefault(host_of(settings.push_url), Host(Circuit(self._random)))
        receiver = Receiver(host, Circuit(self._random))
        pusher = TopicPusher(self._client, topic, secrets, sender, receiver, self._payloads, self._metrics)
        self._running[topic.name] = pusher, asyncio.create_task(pusher.run(), name=f"pusher of {topic.name}")
        wait = shown_duration(settings.push_timeout_ms)
        if settings.push_timeout_ms > settings.max_lease_ms:
            log.warning(
                "topic %r has push_timeout %s above max_lease %s: a webhook that outlasts its lease is sent again "
                "meanwhile. Raise max_lease",
                topic.name,
                wait,
                shown_duration(settings.max_lease_ms),
            )
        log.info("topic %r is pushed, %d at a time, each up to %s", topic.name, settings.push_concurrency, wait)

    def rest(self) -> None:
        """Take nothing more. Requests under way go on."""
        self._rested_s = asyncio.get_running_loop().time()
        for pusher, task in self._running.values():
            self._resting.add(asyncio.ensure_future(_last_takes(pusher, task)))

    def _stop(self, name: str, grace_s: float) -> None:
        """Let a topic's pusher take no more. Nobody else waits for its requests under way, which may be slow."""
        pusher, task = self._running.pop(name)
        if task.done() and not task.cancelled() and (bug := task.exception()) is not None:
            log.error("the pusher of topic %r failed, and is started again", name, exc_info=bug)
        ending = asyncio.create_task(_finish(pusher, task, grace_s), name=f"end of {name}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _last_takes(pusher: TopicPusher, task: asyncio.Task[None]) -> None:
    """Let takes under way end. One that is cancelled while its answer comes keeps its messages until their lease
    ends."""
    pusher.stop_taking()
    try:
        await asyncio.wait([task], timeout=ENDING_WAIT_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _finish(pusher: TopicPusher, task: asyncio.Task[None], grace_s: float) -> None:
    try:
        await _last_takes(pusher, task)
    except asyncio.CancelledError:
        grace_s = 0.0
    await pusher.finish(grace_s)


def _connected_alike(one: Topic, other: Topic) -> bool:
    """Return whether two records of a topic go to the same receiver over the same connections."""

    def connected(topic: Topic) -> tuple[object, ...]:
        return topic.uid, topic.settings.push_url, topic.settings.push_concurrency

    return connected(one) == connected(other)


class WebhookPart:
    """The gateway's webhooks: they begin and end with it. `token_file`: of a token with the rights admin and consume;
    empty: none. `allowed`: private networks that webhooks may go to. Raise Invalid."""

    def __init__(
        self, brokers: str, credentials: Credentials, token_file: str, allowed: tuple[str, ...], grace_ms: int
    ) -> None:
        self._guard, self._grace_s, self._brokers = AddressGuard(allowed), grace_ms / 1000.0, brokers
        self._credentials = replace(credentials, token="", token_file=token_file).check()
        self._client: timeline.Timeline | None = None
        self._task: asyncio.Task[None] | None = None
        self._pusher: Pusher | None = None

    async def start(self, metrics: GatewayMetrics) -> None:
        """Begin to push."""
        self._client = timeline.Timeline(self._brokers, "10s", credentials=self._credentials)
        self._pusher = Pusher(self._client, self._guard, random, metrics)
        self._task = asyncio.create_task(self._pusher.run(self._grace_s), name="webhooks")

    def rest(self) -> None:
        """Take nothing more."""
        if self._pusher is not None:
            self._pusher.rest()

    async def stop(self) -> None:
        """Take nothing more, and return after the requests under way or the grace."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
