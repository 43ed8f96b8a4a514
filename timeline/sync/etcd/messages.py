"""etcd's gRPC messages and methods, as far as brokers use them, for any version of protobuf.

The modules of `etcd3` were generated in 2020, and protobuf refuses to load them since its version 4. If they were
generated again, they would load with one or two versions of it. So the descriptors are made from a table at import.
They are in a pool of their own, apart from other copies of etcd's protocol in the process. Numbers and types are those
of etcd's `rpc.proto` and `kv.proto`; protobuf skips fields that are missing here.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
