"""What the server does for a call that only asks, in Lua; the keys are those of `scripts.py`.

Ids in order are wanted by walks alone, so they are put in order when one comes by, some thousands a call, and kept so
by every change for as long as walks go on: `:w` says how far that is, `all` for done, else the server's run and the
cursor of its hash.
"""

from __future__ import annotations

from timeline.storage_plugins.redis.lua import BEFORE

DUE = """
-- ARGV: free until, held until, how many of each bucket. Answers for each key:
-- {ids, values, whether there may be more of the free (1) and the held (2), how many are free}.
local found = {}
for n, base in ipairs(KEYS) do
  local ids = redis.call('ZRANGEBYSCORE', base .. ':f', '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
  local more = #ids == tonumber(ARGV[3]) and 1 or 0
  local held = redis.call('ZRANGEBYSCORE', base .. ':h', '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
  if #held == tonumber(ARGV[3]) then more = more + 2 end
  local free = #ids
  for _, id in ipairs(held) do ids[#ids + 1] = id end
  local values = {}
  if #ids > 0 then values = redis.call('HMGET', base, unpack(ids)) end
  found[n] = {ids, values, more, free}
end
return found
"""

SOONEST = """
-- ARGV[1]: after. Answers the least due of the free and of the held above it, '' when there is none.
local least = {'', ''}
for _, base in ipairs(KEYS) do
  for at, name in ipairs({':f', ':h'}) do
    local first = redis.call('ZRANGEBYSCORE', base .. name, ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if first[2] and (least[at] == '' or tonumber(first[2]) < tonumber(least[at])) then least[at] = first[2] end
  end
end
return least
"""

COUNT = """
local counts = {}
for i = 1, #ARGV - 1 do
  local sum = 0
  for _, base in ipairs(KEYS) do sum = sum + redis.call('ZCOUNT', base .. ':f', ARGV[i], '(' .. ARGV[i + 1]) end
  counts[i] = sum
end
return counts
"""

FETCH = """
-- ARGV for each key: how many, and the ids. Answers the values in order.
local values, at = {}, 1
for _, base in ipairs(KEYS) do
  local count = tonumber(ARGV[at])
  for from = at + 1, at + count, 4000 do
    local part = redis.call('HMGET', base, unpack(ARGV, from, math.min(from + 3999, at + count)))
    for i = 1, #part do values[#values + 1] = part[i] end
  end
  at = at + 1 + count
end
return values
"""

RANGE = """
-- ARGV: suffix, until, how many of each bucket. Answers for each key: ids and values of what is up to there.
local found = {}
for n, base in ipairs(KEYS) do
  local ids = redis.call('ZRANGEBYSCORE', base .. ARGV[1], '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
  local values = {}
  for from = 1, #ids, 4000 do
    local part = redis.call('HMGET', base, unpack(ids, from, math.min(from + 3999, #ids)))
    for i = 1, #part do values[#values + 1] = part[i] end
  end
  found[n] = {ids, values}
end
return found
"""

TAGGED = """
-- KEYS: one. ARGV: size of tag and tag, the id after which to go on, how many. Answers ids and values.
local start = ARGV[1]
local members = redis.call('ZRANGEBYLEX', KEYS[1] .. ':t', (ARGV[2] == '' and '[' or '(') .. start .. ARGV[2],
  '[' .. start .. string.rep('\\255', 256), 'LIMIT', 0, ARGV[3])
for i = 1, #members do members[i] = members[i]:sub(#start + 1) end
local values = {}
for from = 1, #members, 4000 do
  local part = redis.call('HMGET', KEYS[1], unpack(members, from, math.min(from + 3999, #members)))
  for i = 1, #part do values[#values + 1] = part[i] end
end
return {members, values}
"""

WALK = """
-- The ids of buckets in order. ARGV: how many in all, how many of a bucket's hash one call puts in order, how long
-- their order is kept, the id after which to go on in the first key's bucket.
-- Answers for each key as far as it got: {whether its ids are in order by now, ids, values}.
local left, found = tonumber(ARGV[1]), {}
for n, base in ipairs(KEYS) do
  local order, at = base .. ':i', redis.call('GET', base .. ':w')
  redis.call('PEXPIRE', order, 2 * ARGV[3])  -- first: a server without memory refuses what begins with more
  local run, cursor
  if at ~= 'all' then  -- a cursor means nothing to another process: after a restart, a fail-over or a move of the slot
    run = redis.call('INFO', 'server'):match('run_id:(%w+)')
    cursor = at and at:match('^' .. run .. ' (%d+)$')
  end
  if at ~= 'all' and not cursor then
    redis.call('UNLINK', order)
    redis.call('ZADD', order, 0, '')
    redis.call('PEXPIRE', order, 2 * ARGV[3])
    cursor = '0'
  end
  if cursor then
    local scanned = redis.call('HSCAN', base, cursor, 'COUNT', ARGV[2])
    local pairs, members = scanned[2], {}
    for i = 1, #pairs, 2 do
      if pairs[i + 1]:byte(22) < 4 then
        members[#members + 1] = 0
        members[#members + 1] = pairs[i]
      end
    end
    for from = 1, #members, 4000 do
      redis.call('ZADD', order, unpack(members, from, math.min(from + 3999, #members)))
    end
    at = scanned[1] == '0' and 'all' or run .. ' ' .. scanned[1]
  end
  redis.call('SET', base .. ':w', at, 'PX', ARGV[3])
  if at ~= 'all' then
    found[n] = {0, {}, {}}
    break
  end
  local ids = redis.call('ZRANGEBYLEX', order, '(' .. (n == 1 and ARGV[4] or ''), '+', 'LIMIT', 0, left)
  local values = {}
  for from = 1, #ids, 4000 do
    local part = redis.call('HMGET', base, unpack(ids, from, math.min(from + 3999, #ids)))
    for i = 1, #part do values[#values + 1] = part[i] end
  end
  left = left - #ids
  found[n] = {1, ids, values}
  if left <= 0 then break end
end
return found
"""

LEASES = """
-- KEYS: one. How many leases end after ARGV[1].
return redis.call('ZCOUNT', KEYS[1] .. ':h', '(' .. ARGV[1], '+inf')
"""

HELD = (
    BEFORE
    + """
-- KEYS: one. What a holder has, by due. ARGV: now, the holder, the due and the id after which to go on, how many to
-- look at, how many to answer. Answers ids, values, and the due and id to go on with ('' and '': no more).
local base, held, due, last = KEYS[1], KEYS[1] .. ':h', ARGV[3], ARGV[4]
local from = redis.call('ZCOUNT', held, '-inf', ARGV[1])
if last ~= '' then
  if redis.call('ZSCORE', held, last) == due then
    from = redis.call('ZRANK', held, last) + 1
  else
    from = math.max(from, redis.call('ZCOUNT', held, '-inf', '(' .. due))
    local passed = true
    while passed do  -- among those of the same due, which may be many, up to where the lost one was
      local near = redis.call('ZRANGE', held, from, from + 999, 'WITHSCORES')
      passed = #near > 0
      for at = 1, #near, 2 do
        if near[at + 1] ~= due or before(last, near[at]) then
          passed = false
          break
        end
        from = from + 1
      end
    end
  end
end
local listed = redis.call('ZRANGE', held, from, from + ARGV[5] - 1)
local stand = #listed > 0 and redis.call('HMGET', base, unpack(listed)) or {}
local ids, values, looked = {}, {}, 0
for at, value in ipairs(stand) do
  looked = at
  if value and value:byte(21) == #ARGV[2] and value:sub(-#ARGV[2]) == ARGV[2] then
    ids[#ids + 1], values[#values + 1] = listed[at], value
    if #ids == tonumber(ARGV[6]) then break end
  end
end
if looked == #listed and #listed < tonumber(ARGV[5]) then return {ids, values, '', ''} end
return {ids, values, redis.call('ZSCORE', held, listed[looked]), listed[looked]}
"""
)

__all__ = ["COUNT", "DUE", "FETCH", "HELD", "LEASES", "RANGE", "SOONEST", "TAGGED", "WALK"]
