"""One member of etcd, asked through `etcd3` 0.12. No other module knows `etcd3`.

The faults of `etcd3`, and their repairs here:

- Its generated modules do not load with today's protobuf. It gets ours (`make_module`), in a copy of `etcd3` that
  nothing else in the process meets.
- Its errors have lost etcd's code, and some pass through raw. `_asked` reads the code of the gRPC error behind them.
- Its watch restarts by itself and skips what happened in between. Once its channel is closed, its thread runs in
  circles. `EtcdWatch` ends at the first error and reports it.
- A refresh of a lost lease answers TTL 0 like any other refresh. `keep_alive` raises EtcdLeaseLost.
- It ignores `min_mod_revision`. `list` builds its own request.
- It puts a token into credentials that gRPC sends only over TLS. Without TLS the token travels as metadata.
- It knows one address. `EtcdSession` makes a client for each of several.

Three attributes of `Etcd3Client` are used that its documentation does not name:

- `channel`, for the two calls above that it cannot make: `list` and `watch`
- `metadata`, which holds the token for these two calls
- `call_credentials`, which are removed where there is no TLS

Every call ends within the client's deadline. One thread uses a client; each `EtcdWatch` has its own thread.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from timeline.config import did_you_mean, joined, parse_duration_ms, split_address
from timeline.errors import Invalid
from timeline.sync.membership import MembershipRefused

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "timeline"
USER, PASSWORD = "TIMELINE_ETCD_USER", "TIMELINE_ETCD_PASSWORD"
"""Variables for user and password, instead of the URL."""
TTL_MS = (2_000, 60_000)
"""With its defaults etcd grants no shorter lease. With a longer one a dead broker is listed for too long."""
EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379/prefix"
SETTINGS = ("ca", "cert", "key", "tls", "ttl")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the certificates that are trusted, and this broker's own certificate and key, if etcd asks."""

    ca: str
    cert: str = ""
    key: str = ""

    def check(self) -> None:
        """Raise Invalid if one of them cannot be read."""
        for name in filter(None, (self.ca, self.cert, self.key)):
            try:
                Path(name).read_bytes()
            except OSError as cannot:
                raise Invalid(f"sync: the file {name!r:.200} cannot be read: {cannot.strerror}") from cannot


@dataclass(frozen=True, slots=True)
class EtcdLocation:
    """The place of a cluster's membership. `endpoints`: host:port of etcd's members, of which any will do. `prefix`: of
    all keys, without slashes around it. `ttl_s`: how long a broker is listed after its last refresh."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    user: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    ttl_s: int = 5

    def __str__(self) -> str:
        """Return it as it may be shown: without the password."""
        return f"etcd://{self.user and f'{self.user}:…@'}{','.join(self.endpoints)}/{self.prefix}"


def location_of(url: str, variables: Mapping[str, str] | None = None) -> EtcdLocation:
    """Return the location that `url` names. `variables`: the environment (default: the process's). Raise Invalid with
    what to change; it never contains a password."""
    variables = os.environ if variables is None else variables
    rest, _, query = url.removeprefix("etcd://").partition("?")
    authority, _, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    if "@" in path or "@" in query:
        raise Invalid(f"sync: a password with / or ? in it is percent-encoded in a URL, or given as {PASSWORD}")
    user, _, password = credentials.partition(":")
    user, password = unquote(user) or variables.get(USER, ""), unquote(password) or variables.get(PASSWORD, "")
    if bool(user) != bool(password):
        missing, given = ("password", "user") if user else ("user", "password")
        raise Invalid(
            f"sync: etcd's {given} is given without the {missing}: etcd://user:password@…, or {USER}, {PASSWORD}"
        )
    settings = _settings(query)
    return EtcdLocation(
        tuple(_endpoint(host) for host in hosts.split(",")) if hosts else _no_hosts(),
        _prefix(path),
        user,
        password,
        _tls(settings),
        _ttl_s(settings),
    )


def _no_hosts() -> tuple[str, ...]:
    raise Invalid(f"sync: etcd:// needs the addresses of etcd's members, such as {EXAMPLE}")


def _endpoint(text: str) -> str:
    with_port = text if re.search(r"(^[^:]*|\]):[0-9]+$", text) else f"{text}:{DEFAULT_PORT}"
    try:
        host, port = split_address(with_port)
    except Invalid as bad:
        raise Invalid(f"sync: {bad.reason}, several with commas between them") from None
    if not host or not port:
        raise Invalid(f"sync: {text!r:.80} is no address of etcd: host:port, such as {EXAMPLE}")
    return joined(host, port)


def _prefix(path: str) -> str:
    prefix = unquote(path).strip("/") or DEFAULT_PREFIX
    if not prefix.isprintable() or len(prefix.encode()) > 255 or "//" in prefix:
        raise Invalid(
            f"sync: the prefix is 1 to 255 bytes of printable characters, such as {EXAMPLE}, not {prefix!r:.80}"
        )
    return prefix


def _settings(query: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in SETTINGS:
            raise Invalid(
                f"sync: etcd:// takes {', '.join(SETTINGS)} behind the ?, not {name!r:.40}"
                f"{did_you_mean(name, SETTINGS)}"
            )
        settings[name] = unquote(value)
    return settings


def _tls(settings: Mapping[str, str]) -> Tls | None:
    ca, cert, key = (settings.get(name, "") for name in ("ca", "cert", "key"))
    asked = settings.get("tls", "1" if ca or cert or key else "0")
    if asked not in ("0", "1"):
        raise Invalid(f"sync: tls is 0 or 1, not {asked!r:.40}")
    if asked == "0":
        if ca or cert or key:
            raise Invalid(
                "sync: ca, cert and key are for TLS, and tls=0 says that there is none: leave one of them out"
            )
        return None
    if bool(cert) != bool(key):
        raise Invalid("sync: cert and key belong together: this broker's certificate and its key, both as files in PEM")
    trusted = ca or ssl.get_default_verify_paths().cafile
    if not trusted:
        raise Invalid("sync: this system has no file of trusted certificates: name one with ca=")
    return Tls(trusted, cert, key)


def _ttl_s(settings: Mapping[str, str]) -> int:
    low, high = TTL_MS
    try:
        ttl_ms = parse_duration_ms(settings.get("ttl", "5s"))
    except Invalid as bad:
        raise Invalid(f"sync: ttl: {bad.reason}") from None
    if not low <= ttl_ms <= high or ttl_ms % 1000:
        raise Invalid(f"sync: ttl is whole seconds from {low // 1000} to {high // 1000}, such as 5s")
    return ttl_ms // 1000


# ── the protocol ──

# The modules of `etcd3` were generated in 2020, and protobuf refuses to load them since its version 4. If they were
# generated again, they would load with one or two versions of it. So the descriptors are made from a table at import.
# They are in a pool of their own, apart from other copies of etcd's protocol in the process. Numbers and types are
# those of etcd's `rpc.proto` and `kv.proto`; protobuf skips fields that are missing here.

PACKAGE = "etcdserverpb"

ENUMS = {
    "RangeRequest.SortOrder": "NONE ASCEND DESCEND",
    "RangeRequest.SortTarget": "KEY VERSION CREATE MOD VALUE",
    "Compare.CompareResult": "EQUAL GREATER LESS NOT_EQUAL",
    "Compare.CompareTarget": "VERSION CREATE MOD VALUE LEASE",
}
"""By name, their values from 0 on."""

MESSAGES = {
    "KeyValue": "key=1:bytes create_revision=2:int64 mod_revision=3:int64 version=4:int64 value=5:bytes lease=6:int64",
    "Event": "kv=2:KeyValue",
    "ResponseHeader": "cluster_id=1:uint64 member_id=2:uint64 revision=3:int64 raft_term=4:uint64",
    "RangeRequest": (
        "key=1:bytes range_end=2:bytes limit=3:int64 revision=4:int64 sort_order=5:RangeRequest.SortOrder "
        "sort_target=6:RangeRequest.SortTarget serializable=7:bool keys_only=8:bool count_only=9:bool "
        "min_mod_revision=10:int64"
    ),
    "RangeResponse": "header=1:ResponseHeader kvs=2:KeyValue* more=3:bool count=4:int64",
    "PutRequest": "key=1:bytes value=2:bytes lease=3:int64 prev_kv=4:bool",
    "PutResponse": "header=1:ResponseHeader",
    "DeleteRangeRequest": "key=1:bytes range_end=2:bytes prev_kv=3:bool",
    "DeleteRangeResponse": "header=1:ResponseHeader deleted=2:int64",
    "RequestOp": (
        "request_range=1:RangeRequest/request request_put=2:PutRequest/request "
        "request_delete_range=3:DeleteRangeRequest/request"
    ),
    "ResponseOp": (
        "response_range=1:RangeResponse/response response_put=2:PutResponse/response "
        "response_delete_range=3:DeleteRangeResponse/response"
    ),
    "Compare": (
        "result=1:Compare.CompareResult target=2:Compare.CompareTarget key=3:bytes version=4:int64/target_union "
        "create_revision=5:int64/target_union mod_revision=6:int64/target_union value=7:bytes/target_union "
        "lease=8:int64/target_union"
    ),
    "TxnRequest": "compare=1:Compare* success=2:RequestOp* failure=3:RequestOp*",
    "TxnResponse": "header=1:ResponseHeader succeeded=2:bool responses=3:ResponseOp*",
    "WatchCreateRequest": "key=1:bytes range_end=2:bytes start_revision=3:int64",
    "WatchRequest": "create_request=1:WatchCreateRequest/request_union",
    "WatchResponse": (
        "header=1:ResponseHeader watch_id=2:int64 created=3:bool canceled=4:bool compact_revision=5:int64 "
        "cancel_reason=6:string events=11:Event*"
    ),
    "LeaseGrantRequest": "TTL=1:int64 ID=2:int64",
    "LeaseGrantResponse": "header=1:ResponseHeader ID=2:int64 TTL=3:int64 error=4:string",
    "LeaseRevokeRequest": "ID=1:int64",
    "LeaseRevokeResponse": "header=1:ResponseHeader",
    "LeaseKeepAliveRequest": "ID=1:int64",
    "LeaseKeepAliveResponse": "header=1:ResponseHeader ID=2:int64 TTL=3:int64",
    "LeaseTimeToLiveRequest": "ID=1:int64 keys=2:bool",
    "LeaseTimeToLiveResponse": "header=1:ResponseHeader ID=2:int64 TTL=3:int64 grantedTTL=4:int64 keys=5:bytes*",
    "AuthenticateRequest": "name=1:string password=2:string",
    "AuthenticateResponse": "header=1:ResponseHeader token=2:string",
}
"""By name, the fields: name=number:type, `*` for repeated ones, and behind a slash the union that a field is of."""

SERVICES = {
    "KV": "Range:RangeRequest:RangeResponse Put:PutRequest:PutResponse Txn:TxnRequest:TxnResponse",
    "Lease": (
        "LeaseGrant:LeaseGrantRequest:LeaseGrantResponse LeaseRevoke:LeaseRevokeRequest:LeaseRevokeResponse "
        "LeaseKeepAlive:LeaseKeepAliveRequest*:LeaseKeepAliveResponse* "
        "LeaseTimeToLive:LeaseTimeToLiveRequest:LeaseTimeToLiveResponse"
    ),
    "Watch": "Watch:WatchRequest*:WatchResponse*",
    "Auth": "Authenticate:AuthenticateRequest:AuthenticateResponse",
    "Cluster": "",
    "Maintenance": "",
}
"""By name, the methods: name, request, answer; `*` for streams. A client makes the last two and calls neither."""

_FIELD = re.compile(r"(\w+)=(\d+):([\w.]+)(\*?)(?:/(\w+))?")
_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _TYPES.TYPE_BYTES,
    "string": _TYPES.TYPE_STRING,
    "bool": _TYPES.TYPE_BOOL,
    "int64": _TYPES.TYPE_INT64,
    "uint64": _TYPES.TYPE_UINT64,
}


def make_module(name: str) -> ModuleType:
    """Return a module called `name` with the message classes and the stubs (`KVStub` …) of all services."""
    module = ModuleType(name)
    file = descriptor_pb2.FileDescriptorProto(name="timeline_etcd.proto", package=PACKAGE, syntax="proto3")
    for message, fields in MESSAGES.items():
        _describe(file.message_type.add(name=message), fields)
    for enum, values in ENUMS.items():
        owner, _, short = enum.partition(".")
        described = next(each for each in file.message_type if each.name == owner).enum_type.add(name=short)
        for number, value in enumerate(values.split()):
            described.value.add(name=value, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    for message in MESSAGES:
        described = pool.FindMessageTypeByName(f"{PACKAGE}.{message}")
        setattr(module, message, message_factory.GetMessageClass(described))
    for service, methods in SERVICES.items():
        setattr(module, f"{service}Stub", _stub(module, service, methods))
    return module


def _describe(message: Any, fields: str) -> None:
    unions: list[str] = []
    for name, number, type_, repeated, union in _FIELD.findall(fields):
        field = message.field.add(
            name=name, number=int(number), label=_TYPES.LABEL_REPEATED if repeated else _TYPES.LABEL_OPTIONAL
        )
        if type_ in _SCALARS:
            field.type = _SCALARS[type_]
        else:
            field.type = _TYPES.TYPE_ENUM if type_ in ENUMS else _TYPES.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{type_}"
        if union:
            if union not in unions:
                unions.append(union)
                message.oneof_decl.add(name=union)
            field.oneof_index = unions.index(union)


def _stub(module: ModuleType, service: str, methods: str) -> type:
    """Return a stub class: made with a channel, it has an attribute per method."""

    def made(self: Any, channel: grpc.Channel) -> None:
        for method in methods.split():
            name, request, answer = method.split(":")
            streams = (
                f"{'stream' if request.endswith('*') else 'unary'}_{'stream' if answer.endswith('*') else 'unary'}"
            )
            call = getattr(channel, streams)(
                f"/{PACKAGE}.{service}/{name}",
                request_serializer=getattr(module, request.rstrip("*")).SerializeToString,
                response_deserializer=getattr(module, answer.rstrip("*")).FromString,
            )
            setattr(self, name, call)

    return type(f"{service}Stub", (), {"__init__": made, "__doc__": f"The methods of etcd's {service} service."})


log = logging.getLogger("timeline.sync")

MOST_AT_ONCE = 100
"""Keys changed in one transaction; etcd's own limit is 128 by default."""
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
    # A connection of its own does not wait because an earlier one to the same place failed.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class EtcdTrouble(Exception):
    """etcd did not do it, or its answer was lost. Trying again, perhaps at another member, helps."""


class EtcdLeaseLost(EtcdTrouble):
    """The lease is gone, with all keys that were bound to it."""


@dataclass(frozen=True, slots=True)
class EtcdEntry:
    """A key. `revision`: of its last change. `lease`: 0 if it is bound to none."""

    key: str
    value: bytes
    revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries under a prefix at etcd's `revision`. `count`: all there are, listed or not."""

    entries: Sequence[EtcdEntry]
    revision: int
    count: int


def _etcd3() -> Any:
    """Return the module `etcd3.client` on our messages, in a copy that nothing else in this process meets."""
    others = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "etcd3"}
    for name in others:
        del sys.modules[name]
    try:
        sys.modules["etcd3.etcdrpc"] = _RPC
        return importlib.import_module("etcd3.client")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "etcd3"]:
            del sys.modules[name]
        sys.modules.update(others)


_RPC: Any = make_module("etcd3.etcdrpc")
# Once, at import: of two threads, one would remove what the other has just put there.
_ETCD3 = _etcd3()


class Client:
    """A connection to the member of etcd at `endpoint`. Raises EtcdTrouble if it does not answer, MembershipRefused if
    user, password or certificate are wrong."""

    def __init__(self, location: EtcdLocation, endpoint: str, deadline_s: float) -> None:
        self._location, self.endpoint, self._deadline_s = location, endpoint, deadline_s
        self._connected = self._answered = False
        host, port = split_address(endpoint)
        tls = location.tls
        with self._asked():
            self._etcd = _ETCD3.Etcd3Client(
                f"[{host}]" if ":" in host else host,
                port,
                ca_cert=tls.ca if tls else None,
                cert_cert=(tls.cert or None) if tls else None,
                cert_key=(tls.key or None) if tls else None,
                timeout=deadline_s,
                user=location.user or None,
                password=location.password or None,
                grpc_options=_OPTIONS,
            )
        self._connected = True
        self._channel, self._metadata = self._etcd.channel, self._etcd.metadata
        if tls is None:
            self._etcd.call_credentials = None

    def close(self) -> None:
        """End every call and watch that is under way."""
        self._etcd.close()

    def get(self, key: str) -> EtcdEntry | None:
        """Return the key's entry, None when it is not there."""
        with self._asked():
            value, found = self._etcd.get(key)
        return None if found is None else EtcdEntry(key, value, found.mod_revision, found.lease_id)

    def list(self, prefix: str, since: int = 0) -> Listing:
        """Return what is under `prefix` (which ends with a slash) and was changed at revision `since` or later."""
        first = prefix.encode()
        request = _RPC.RangeRequest(key=first, range_end=_after(first), min_mod_revision=since)
        with self._asked():
            answer = _RPC.KVStub(self._channel).Range(request, timeout=self._deadline_s, metadata=self._metadata)
        entries = [EtcdEntry(kv.key.decode(errors="replace"), kv.value, kv.mod_revision, kv.lease) for kv in answer.kvs]
        return Listing(entries, answer.header.revision, answer.count)

    def create(self, key: str, value: str, lease: int = 0) -> bool:
        """Put the key if it is not there. Return whether it was put."""
        of = self._etcd.transactions
        with self._leased():
            done, _ = self._etcd.transaction([of.create(key) == 0], [of.put(key, value, lease)], [])
        return bool(done)

    def change(self, values: Mapping[str, str | None], lease: int = 0) -> None:
        """Put keys, bound to the lease; None deletes one."""
        of, changes = self._etcd.transactions, list(values.items())
        for start in range(0, len(changes), MOST_AT_ONCE):
            part = changes[start : start + MOST_AT_ONCE]
            does = [of.delete(key) if value is None else of.put(key, value, lease) for key, value in part]
            with self._leased():
                self._etcd.transaction([], does, [])

    def remove(self, entry: EtcdEntry) -> None:
        """Delete the key, unless it was changed since it was read."""
        of = self._etcd.transactions
        with self._asked():
            self._etcd.transaction([of.mod(entry.key) == entry.revision], [of.delete(entry.key)], [])

    def grant(self, ttl_s: int) -> int:
        """Return a new lease."""
        with self._asked():
            return int(self._etcd.lease(ttl_s).id)

    def keep_alive(self, lease: int) -> None:
        """Refresh the lease for another TTL. Raise EtcdLeaseLost if it is over already."""
        with self._leased():
            answers = list(self._etcd.refresh_lease(lease))
        if not answers:
            raise EtcdTrouble(f"etcd at {self.endpoint} ended a refresh of the lease without an answer")
        if answers[0].TTL <= 0:
            raise EtcdLeaseLost("the lease ran out")

    def remaining_s(self, lease: int) -> int:
        """Return how long the lease still lives, in whole seconds; below 0 if it is over."""
        with self._asked():
            return int(self._etcd.get_lease_info(lease).TTL)

    def revoke(self, lease: int) -> None:
        """End the lease, and all keys that are bound to it. Harmless if it is over already."""
        try:
            with self._leased():
                self._etcd.revoke_lease(lease)
        except EtcdLeaseLost:
            return

    def watch(self, prefix: str, since: int, changed: Callable[[], None], ended: Callable[[str], None]) -> EtcdWatch:
        """Watch what is under `prefix`. A thread of its own calls `changed` at each change from revision `since` on. It
        calls `ended` with the reason when the watch ends, unless it was stopped."""
        first = prefix.encode()
        create = _RPC.WatchCreateRequest(key=first, range_end=_after(first), start_revision=since)
        # A member that has lost its leader ends the watch by itself.
        metadata = (*(self._metadata or ()), ("hasleader", "true"))
        watched = _Requests(_RPC.WatchRequest(create_request=create))
        call = _RPC.WatchStub(self._channel).Watch(watched, metadata=metadata)
        return EtcdWatch(call, watched, changed, ended)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raise what an error of a call means."""
        try:
            yield
        except (_ETCD3.exceptions.Etcd3Exception, grpc.RpcError) as error:
            raise self._meant(error if isinstance(error, grpc.RpcError) else error.__context__) from error
        self._answered = self._connected

    @contextmanager
    def _leased(self) -> Iterator[None]:
        """Do the same for calls that name a lease: NOT_FOUND is about the lease."""
        try:
            with self._asked():
                yield
        except EtcdTrouble as trouble:
            cause = trouble.__cause__
            rpc = cause if isinstance(cause, grpc.Call) else getattr(cause, "__context__", None)
            if isinstance(rpc, grpc.Call) and rpc.code() is grpc.StatusCode.NOT_FOUND:
                raise EtcdLeaseLost("etcd does not know the lease any more") from trouble
            raise

    def _meant(self, error: Any) -> Exception:
        if not isinstance(error, grpc.RpcError):
            return EtcdTrouble(f"etcd at {self.endpoint}: {error!r}")
        code, said = error.code(), str(error.details() or "").removeprefix("etcdserver: ")
        user = self._location.user
        # Before it is connected a client asks for one thing, a token for its user.
        if not self._connected and code is grpc.StatusCode.FAILED_PRECONDITION:
            return MembershipRefused(f"etcd at {self.endpoint} knows no users: leave user and password out of --sync")
        if not self._connected and code is grpc.StatusCode.INVALID_ARGUMENT:
            return MembershipRefused(f"etcd at {self.endpoint} refuses user {user!r}: {said}")
        # etcd refuses a call without a user before it looks at it. What it refuses later is wrong in itself.
        if not user and not self._answered and code is grpc.StatusCode.INVALID_ARGUMENT:
            return MembershipRefused(
                f"etcd at {self.endpoint} asks for a user: --sync etcd://user:password@…, or {USER} and {PASSWORD}"
            )
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return MembershipRefused(
                f"etcd at {self.endpoint} does not let {repr(user) if user else 'a broker without user'} read and "
                f"write /{self._location.prefix}/: give it a user with a role for that"
            )
        return EtcdTrouble(f"etcd at {self.endpoint} does not answer as it should: {code.name}, {said}")


class EtcdWatch:
    """A watch under way, in a thread of its own."""

    def __init__(
        self, call: Any, requests: _Requests, changed: Callable[[], None], ended: Callable[[str], None]
    ) -> None:
        self._call, self._requests, self._changed, self._ended = call, requests, changed, ended
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="etcd watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, without a call of `ended`."""
        self._stopped = True
        self._requests.end()
        self._call.cancel()

    def _run(self) -> None:
        why = "etcd ended the watch"
        try:
            for answer in self._call:
                if answer.canceled or answer.compact_revision:
                    why = answer.cancel_reason or f"etcd has compacted what was before {answer.compact_revision}"
                    break
                if answer.events:
                    self._changed()
        except grpc.RpcError as error:
            why = f"{error.code().name}, {error.details()}" if isinstance(error, grpc.Call) else repr(error)
        finally:
            self._requests.end()
            if not self._stopped:
                self._ended(why)


class _Requests:
    """The requests of a watch: one, and none until it ends. For etcd a stream is over when its requests end."""

    def __init__(self, first: object) -> None:
        self._first: object | None = first
        self._over = threading.Event()

    def end(self) -> None:
        self._over.set()

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> object:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._over.wait()
        raise StopIteration


def _after(prefix: bytes) -> bytes:
    """Return the first key after all that begin with `prefix`, whose last byte is a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
