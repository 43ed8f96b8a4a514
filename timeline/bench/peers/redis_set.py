"""Redis' own recipe for due times: a sorted set by time, and scripts that take and acknowledge in batches.

`python -m timeline.bench.peers.redis_set work` is a worker. It acknowledges one batch and takes the next in one round
trip. `… put` adds a batch by one script. Both first read `{"url": …, "name": …, "way": …}` from standard input: `name`
prefixes every key, and `way` is the size of a batch. See `peers` for their lines.

A taken message is moved forward by its lease, as Timeline does it. So a worker that dies loses nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import redis

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, asked_of, id_output

PUT = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local due, payloads = {}, {}
for at = 1, #ARGV, 2 do
  local id = string.sub(ARGV[at + 1], 1, %d)
  due[at], due[at + 1] = math.max(now_ms, ARGV[at]), id
  payloads[at], payloads[at + 1] = id, ARGV[at + 1]
end
redis.call('ZADD', KEYS[1], unpack(due))
redis.call('HSET', KEYS[2], unpack(payloads))
"""
ACK = """
redis.call('ZREM', KEYS[1], unpack(ARGV))
redis.call('HDEL', KEYS[2], unpack(ARGV))
"""
TAKE = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])
if #ids == 0 then
  return {}
end
local leased = {}
for at, id in ipairs(ids) do
  leased[2 * at - 1], leased[2 * at] = now_ms + ARGV[2], id
end
redis.call('ZADD', KEYS[1], unpack(leased))
return redis.call('HMGET', KEYS[2], unpack(ids))
"""
MOST = 2_000
"""Messages of one script: `unpack` has room for twice as many values, and little more."""
LEASE_MS = 30_000
POLLED_S = 0.001
"""How long it waits when nothing is due. This recipe does not wake its workers."""


def keys_of(name: str) -> list[str]:
    """Return the sorted set and the hash of payloads."""
    return [f"{name}:due", f"{name}:payloads"]


def work(url: str, name: str, way: str) -> None:
    """Work until SIGTERM."""
    ids = id_output()
    server = redis.Redis.from_url(url)
    ack, take = server.register_script(ACK), server.register_script(TAKE)
    os.write(ids, f"{READY}\n".encode())
    done: list[bytes] = []
    while True:
        pipeline = server.pipeline(transaction=False)
        if done:
            ack(keys_of(name), done, pipeline)
        take(keys_of(name), [min(int(way), MOST), LEASE_MS], pipeline)
        payloads: list[bytes] = pipeline.execute()[-1]
        done = [payload[:ID_BYTES] for payload in payloads]
        if done:
            os.write(ids, b"\n".join(done) + b"\n")
        else:
            time.sleep(POLLED_S)


def put(url: str, name: str, way: str) -> None:
    """Answer the lines of `peers`."""
    server = redis.Redis.from_url(url)
    adding = server.register_script(PUT % ID_BYTES)
    print(READY, flush=True)
    for line in sys.stdin:
        asked = line.strip()
        if asked == LEFT:
            print(server.zcard(keys_of(name)[0]), flush=True)
        elif asked == DROP:
            server.delete(*keys_of(name))
            print(DROPPED, flush=True)
        else:
            payloads, due_ms = asked_of(asked)
            pairs: list[str | int] = []
            for due, payload in zip(due_ms or itertools.repeat(0), payloads, strict=False):
                pairs += [due, payload]
            for start in range(0, len(pairs), 2 * MOST):
                adding(keys_of(name), pairs[start : start + 2 * MOST])
            print(STORED, flush=True)


if __name__ == "__main__":
    {"work": work, "put": put}[sys.argv[1]](**json.loads(sys.stdin.readline()))
