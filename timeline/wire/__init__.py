"""The wire: bytes ↔ frames, verified before use. `frames.py` lists the frames.

    data = encode(frame)                  frames.py → codec.py → bytes
    frame = decode(data)                  bytes → verify.py → codec.py → frames.py
    frame = decode_as(data, Produce)
    refused = validate_produce(frame)     bad messages of a sound frame

`schemas/fbs/timeline.fbs` defines how frames lie in bytes. `make schema` makes `generated/` from it.
"""

from timeline.model import LateCause, LeavingReason
from timeline.wire.codec import decode, decode_as, encode
from timeline.wire.frames import (
    AIM_BYTES,
    MAJOR,
    MAX_COUNT,
    MAX_FRAME_BYTES,
    MAX_SCHEDULES_LIMIT,
    MAX_TAKE_BYTES,
    MAX_TAKE_MESSAGES,
    MAX_TAKE_WAIT_MS,
    METHODS,
    MINOR,
    SCHEDULES_MINOR,
    SERVICE,
    Beat,
    BrokerStatus,
    Consumers,
    Credit,
    Deliver,
    Forecast,
    Forecasted,
    Frame,
    Health,
    Hello,
    Hint,
    Hinted,
    Late,
    LateList,
    LatenessCounts,
    Leaving,
    Mutate,
    Mutated,
    MutateFlag,
    MutateTag,
    Ping,
    Pong,
    Produce,
    Produced,
    PutFlag,
    Scan,
    ScanPage,
    ScheduleAction,
    ScheduleAnswer,
    ScheduleCall,
    Settle,
    Settled,
    SettleFlag,
    StatusRequest,
    TagMutated,
    Take,
    TopicAction,
    TopicList,
    TopicLoads,
    Topics,
    Welcome,
)
from timeline.wire.transport import Fault, Service, Stream, Transport, TransportError
from timeline.wire.validate import (
    Judgement,
    validate_headers,
    validate_mutate,
    validate_produce,
    validate_settle,
)
from timeline.wire.verify import UnknownFrame, WireError, WireVersionError

__all__ = [
    "AIM_BYTES", "MAJOR", "MAX_COUNT", "MAX_FRAME_BYTES", "MAX_SCHEDULES_LIMIT", "MAX_TAKE_BYTES", "MAX_TAKE_MESSAGES",
    "MAX_TAKE_WAIT_MS", "METHODS", "MINOR", "SCHEDULES_MINOR", "SERVICE", "Beat", "BrokerStatus", "Consumers", "Credit",
    "Deliver", "Fault", "Forecast", "Forecasted", "Frame", "Health", "Hello", "Hint", "Hinted", "Judgement", "Late",
    "LateCause", "LateList", "LatenessCounts", "Leaving", "LeavingReason", "Mutate", "MutateFlag", "MutateTag",
    "Mutated", "Ping", "Pong", "Produce", "Produced", "PutFlag", "Scan", "ScanPage", "ScheduleAction", "ScheduleAnswer",
    "ScheduleCall", "Service", "Settle", "SettleFlag", "Settled", "StatusRequest", "Stream", "TagMutated", "Take",
    "TopicAction", "TopicList", "TopicLoads", "Topics", "Transport", "TransportError", "UnknownFrame", "Welcome",
    "WireError", "WireVersionError", "decode", "decode_as", "encode", "validate_headers", "validate_mutate",
    "validate_produce", "validate_settle",
]  # fmt: skip
