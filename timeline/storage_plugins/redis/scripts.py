"""What the server does for a call that changes something, in Lua.

A bucket's keys share its hash tag: `…}` itself is the hash id → packed value (`records.py`); `:p` the hash id →
payload and headers; `:f`, `:h`, `:x`, `:k` sorted sets of free, held, dead and remembered ids by due, due, death and
settling; `:e` of what expires by its expiry; `:t` of size of tag + tag + id, all at 0; `:gone` stands when the topic
was dropped. While somebody walks a bucket, `:w` stands, and `:i` has its ids in order (`queries.py`). Scripts take any
number of buckets; on a cluster the caller gives one. A script that refuses changes nothing, and deletes before it adds,
so that a server without memory still takes what frees some.
"""

from __future__ import annotations

from timeline.storage_plugins.redis.lease_script import LEASE
from timeline.storage_plugins.redis.lua import PRELUDE

PUT = (
    PRELUDE
    + """
-- ARGV for each key: how many items, and id, value and content for each; no id twice. Stores those that are absent.
-- Answers, flat: the item's number, and what stands instead; -n: bucket n was dropped.
local conflicts = {}
local at, number = 1, 0
for n, base in ipairs(KEYS) do
  local count = tonumber(ARGV[at])
  at = at + 1
  if redis.call('EXISTS', base .. ':gone') == 1 then
    conflicts[#conflicts + 1] = -n
    conflicts[#conflicts + 1] = ''
  else
    local ids, stand = {}, {}
    for i = 1, count do ids[i] = ARGV[at + 3 * i - 3] end
    stand = redis.call('HMGET', base, unpack(ids))
    local fields, contents, times, tags, ages, walked = {}, {}, {}, {}, {}, {}
    local walks = redis.call('EXISTS', base .. ':w') == 1
    local last = 0
    for i = 1, count do
      local id, value = ids[i], ARGV[at + 3 * i - 2]
      if stand[i] then
        conflicts[#conflicts + 1] = number + i - 1
        conflicts[#conflicts + 1] = stand[i]
      else
        fields[last + 1], fields[last + 2] = id, value
        contents[last + 1], contents[last + 2] = id, ARGV[at + 3 * i - 1]
        times[last + 1], times[last + 2] = text(value:sub(9, 16)), id
        if walks then walked[last + 1], walked[last + 2] = 0, id end
        last = last + 2
        local size, expires = value:byte(98), value:sub(23, 30)
        if size > 0 then
          tags[#tags + 1] = 0
          tags[#tags + 1] = value:sub(98, 98 + size) .. id
        end
        if expires ~= ZERO then
          ages[#ages + 1] = text(expires)
          ages[#ages + 1] = id
        end
      end
    end
    spread('HSET', base, fields)
    spread('HSET', base .. ':p', contents)
    spread('ZADD', base .. ':f', times)
    spread('ZADD', base .. ':t', tags)
    spread('ZADD', base .. ':e', ages)
    spread('ZADD', base .. ':i', walked)
  end
  at, number = at + 3 * count, number + count
end
return conflicts
"""
)

CHANGE = (
    PRELUDE
    + """
-- ARGV[1]: '1' to answer with contents. Then for each key: how many items, and id, old, new, content for each.
-- Answers, flat: the item's number, and what stands instead ('' nothing); -n: bucket n was dropped. Then contents.
local names = {':f', ':h', ':x', ':k'}
local function there(kind) return kind > 0 and kind < 4 end
local conflicts, contents = {}, {}
local want = ARGV[1] == '1'
local at, number = 2, 0
for n, base in ipairs(KEYS) do
  local count = tonumber(ARGV[at])
  at = at + 1
  if redis.call('EXISTS', base .. ':gone') == 1 then
    conflicts[#conflicts + 1] = -n
    conflicts[#conflicts + 1] = ''
    at, number = at + 4 * count, number + count
    for _ = 1, want and count or 0 do contents[#contents + 1] = false end
  else
    local mdel, mset, pdel, pset, tdel, tadd, edel, eadd = {}, {}, {}, {}, {}, {}, {}, {}
    local rem, add, fields, idel, iadd = {{}, {}, {}, {}}, {{}, {}, {}, {}}, {}, {}, {}
    local walks = redis.call('EXISTS', base .. ':w') == 1
    for from = 0, count - 1, 2000 do
      local ids = {}
      local till = math.min(from + 1999, count - 1)
      for i = from, till do ids[#ids + 1] = ARGV[at + 4 * i] end
      local stand = redis.call('HMGET', base, unpack(ids))
      for i = from, till do
        local id, old, new, content = unpack(ARGV, at + 4 * i, at + 4 * i + 3)
        local now = stand[i - from + 1] or ''
        if now ~= old then
          conflicts[#conflicts + 1] = number + i
          conflicts[#conflicts + 1] = now
          if want then contents[#contents + 1] = false end
        else
          local was, is = 0, 0
          if old ~= '' then was = old:byte(22) end
          if new ~= '' then is = new:byte(22) end
          local lived, lives = there(was), there(is)
          local fresh = lived and lives and old:sub(31, 38) ~= new:sub(31, 38)
          if was > 0 and was ~= is then rem[was][#rem[was] + 1] = id end
          if is > 0 then
            mset[#mset + 1] = id
            mset[#mset + 1] = new
            local list = add[is]
            list[#list + 1] = text(is > 2 and new:sub(79, 86) or new:sub(9, 16))
            list[#list + 1] = id
          elseif was > 0 then
            mdel[#mdel + 1] = id
          end
          if lived and (fresh or not lives) then
            if not fresh then pdel[#pdel + 1] = id end
            local size = old:byte(98)
            if size > 0 then tdel[#tdel + 1] = old:sub(98, 98 + size) .. id end
          end
          if lives and (fresh or not lived) then
            pset[#pset + 1] = id
            pset[#pset + 1] = content
            local size = new:byte(98)
            if size > 0 then
              tadd[#tadd + 1] = 0
              tadd[#tadd + 1] = new:sub(98, 98 + size) .. id
            end
          end
          if walks and lived ~= lives then
            if lives then
              iadd[#iadd + 1] = 0
              iadd[#iadd + 1] = id
            else
              idel[#idel + 1] = id
            end
          end
          local aged, ages = was == 1 or was == 2, is == 1 or is == 2
          if aged and (fresh or not ages) and old:sub(23, 30) ~= ZERO then edel[#edel + 1] = id end
          if ages and (fresh or not aged) and new:sub(23, 30) ~= ZERO then
            eadd[#eadd + 1] = text(new:sub(23, 30))
            eadd[#eadd + 1] = id
          end
          if want then
            contents[#contents + 1] = false
            fields[#fields + 1] = {#contents, id}
          end
        end
      end
    end
    spread('HDEL', base .. ':p', pdel)
    spread('ZREM', base .. ':t', tdel)
    spread('ZREM', base .. ':e', edel)
    spread('ZREM', base .. ':i', idel)
    spread('HDEL', base, mdel)
    for kind = 1, 4 do spread('ZREM', base .. names[kind], rem[kind]) end
    spread('HSET', base .. ':p', pset)
    spread('HSET', base, mset)
    for kind = 1, 4 do spread('ZADD', base .. names[kind], add[kind]) end
    spread('ZADD', base .. ':t', tadd)
    spread('ZADD', base .. ':e', eadd)
    spread('ZADD', base .. ':i', iadd)
    for _, field in ipairs(fields) do contents[field[1]] = redis.call('HGET', base .. ':p', field[2]) end
    at, number = at + 4 * count, number + count
  end
end
return {conflicts, contents}
"""
)

ACK = (
    PRELUDE
    + """
-- ARGV: now, '1' to remember, how many kinds of token, and of each version (8 bytes) and holder; then for each key: how
-- many items, and id, birth (8 bytes) and kind of token for each. Removes what is held under just that token. Answers a
-- digit an item: 0 removed, 1 removed late, 2 to be decided.
local digits, lates, versions, holders = {}, {}, {}, {}
local now, keep, at = tonumber(ARGV[1]), ARGV[2] == '1', 4
for number = 1, tonumber(ARGV[3]) do
  versions[tostring(number)], holders[tostring(number)], at = ARGV[at], ARGV[at + 1], at + 2
end
for _, base in ipairs(KEYS) do
  local count = tonumber(ARGV[at])
  local ids, held, tags, ages, kept, times = {}, {}, {}, {}, {}, {}
  for i = 1, count do ids[i] = ARGV[at + 3 * i - 2] end
  local stand = redis.call('HMGET', base, unpack(ids))
  local expire = redis.call('EXISTS', base .. ':e') == 1
  for i = 1, count do
    local id, value, digit = ids[i], stand[i], '2'
    if value then
      local size, kind = value:byte(21, 22)
      local token = ARGV[at + 3 * i]
      local holder = holders[token]
      if kind == 2 and size == #holder and value:sub(1, 8) == versions[token] and value:sub(-size) == holder
          and value:sub(31, 38) == ARGV[at + 3 * i - 1] then
        local due, tag = value:sub(9, 16), value:byte(98)
        digit = lates[due]
        if not digit then
          digit = struct.unpack('<i8', due) <= now and '1' or '0'
          lates[due] = digit
        end
        held[#held + 1] = id
        if tag > 0 then tags[#tags + 1] = value:sub(98, 98 + tag) .. id end
        if expire and value:sub(23, 30) ~= ZERO then ages[#ages + 1] = id end
        if keep then
          kept[#kept + 1] = id
          kept[#kept + 1] = value:sub(1, 8) .. string.rep('\\0', 13) .. '\\4' .. ZERO .. value:sub(31, 38)
            .. string.rep('\\0', 32) .. value:sub(71, 78) .. struct.pack('<i8', now) .. string.rep('\\0', 12)
          times[#times + 1] = ARGV[1]
          times[#times + 1] = id
        end
      end
    end
    digits[#digits + 1] = digit
  end
  spread('HDEL', base .. ':p', held)
  spread('ZREM', base .. ':t', tags)
  spread('ZREM', base .. ':e', ages)
  spread('ZREM', base .. ':h', held)
  if #held > 0 and redis.call('EXISTS', base .. ':w') == 1 then spread('ZREM', base .. ':i', held) end
  if keep then
    spread('HSET', base, kept)
    spread('ZADD', base .. ':k', times)
  else
    spread('HDEL', base, held)
  end
  at = at + 1 + 3 * count
end
return table.concat(digits)
"""
)

DROP = """
for _, base in ipairs(KEYS) do
  redis.call('UNLINK', base, base .. ':p', base .. ':f', base .. ':h', base .. ':x', base .. ':k', base .. ':e',
    base .. ':t', base .. ':w', base .. ':i')
  redis.call('SET', base .. ':gone', '1', 'PX', ARGV[1])
end
return 1
"""

SWAP = """
-- A field of a hash, compared and set. ARGV: field, old ('' absent), new ('' to remove it). Answers what stands.
local stands = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if stands ~= ARGV[2] then return stands end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return ARGV[3]
"""

PROBE = """
-- Each command that scripts and calls run, once, on keys of its own. Answers those that this user may not run.
local base, refused = KEYS[1], {}
local window, timeline = base .. ':w', base .. ':f'
local function try(name, ...)
  local answer = redis.pcall(name, ...)
  local text = type(answer) == 'table' and answer.err or ''
  if text:find('permission') or text:find('executing the script can') then refused[#refused + 1] = name end
end
try('SET', window, '1', 'PX', 1000)
try('GET', window)
try('EXISTS', window)
try('PEXPIRE', window, 1000)
try('HSET', base, 'a', '1')
try('HGET', base, 'a')
try('HMGET', base, 'a')
try('HVALS', base)
try('HGETALL', base)
try('HSCAN', base, '0', 'COUNT', 1)
try('HDEL', base, 'a')
try('ZADD', timeline, 1, 'a')
try('ZRANGE', timeline, 0, 0)
try('ZRANGEBYSCORE', timeline, 1, 1)
try('ZRANGEBYLEX', timeline, '-', '+')
try('ZCOUNT', timeline, 1, 1)
try('ZSCORE', timeline, 'a')
try('ZRANK', timeline, 'a')
try('ZREM', timeline, 'a')
try('ZREMRANGEBYRANK', timeline, 0, 0)
try('INFO', 'server')
try('TIME')
try('UNLINK', base, window, timeline)
return refused
"""

WRITING = frozenset((ACK, CHANGE, DROP, LEASE, PUT, SWAP))
"""The scripts that change something: an answer that is lost leaves open whether they did."""

__all__ = ["ACK", "CHANGE", "DROP", "LEASE", "PROBE", "PUT", "SWAP", "WRITING"]
