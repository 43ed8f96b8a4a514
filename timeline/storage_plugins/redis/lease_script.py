"""The script of a lease: finds what is due in any number of buckets, deals it, and writes it down, in one call."""

from __future__ import annotations

from timeline.storage_plugins.redis.lua import BEFORE, PRELUDE

LEASE = (
    PRELUDE
    + BEFORE
    + """
-- ARGV: now, free until, held until, most deliveries (0: any), '1' to tell what comes next, whose turn it is, then of
-- each grant: holder, count, length in ms, bytes, '1' where alone.
-- Takes the earliest by (due, id), dealt in turn. Answers: for each bucket, as often as something was taken there,
-- ids, values as they were, turns, contents where they are small, and the number of its key; ids and values of
-- what was met that has expired or was delivered out; whether there may be more; whose turn it is then; the earliest
-- due of what is free and of what is held.
local now, limit, wanted, turn = tonumber(ARGV[1]), tonumber(ARGV[4]), 0, tonumber(ARGV[6])
local holders, counts, lengths, room, alone = {}, {}, {}, {}, {}
for at = 7, #ARGV, 5 do
  local g = #holders + 1
  holders[g], counts[g], lengths[g] = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  room[g], alone[g] = tonumber(ARGV[at + 3]), ARGV[at + 4] == '1'
  wanted = wanted + counts[g]
end
local most, MOST_BYTES = math.min(wanted, 2000), 4194304  -- so much at once: others wait meanwhile
local count, spent, full = 0, 0, wanted == 0
local answer, odd, odds = {}, {}, {}

local memo, weights = {}, {}
local function known(start)  -- what the first 30 bytes of a value say
  local one = memo[start]
  if not one then
    local version, due, deliveries, size, _, expires = struct.unpack('<i8i8I4I1I1i8', start)
    local out = limit > 0 and deliveries >= limit
    one = {version = version, due = due, deliveries = deliveries, held = size > 0, new = {}, text = {}}
    one.odd = (expires > 0 and expires <= now) or (out and due <= now)
    one.rests = out and due > now
    memo[start] = one
  end
  return one
end
local function leased(one, g)  -- the first 22 bytes once grant g has it
  local due = math.max(now, one.due) + lengths[g]
  local new = struct.pack('<i8i8I4I1I1', one.version + 1, due, one.deliveries + 1, #holders[g], 2)
  one.new[g], one.text[g] = new, string.format('%.0f', due)
  return new
end
local function deal(size)
  for step = 0, #holders - 1 do
    local g = (turn + step - 1) % #holders + 1
    if counts[g] > 0 and (size <= room[g] or alone[g]) then
      counts[g], room[g], alone[g] = counts[g] - 1, room[g] - size, false
      turn = g % #holders + 1
      return g
    end
  end
end
local function take(bucket, id, value, one)
  local weight = value:sub(87, 94)
  local size = weights[weight]
  if not size then
    local payload, headers = struct.unpack('<I4I4', weight)
    size = payload + headers
    weights[weight] = size
  end
  local g = deal(size)
  if not g then
    full = true
    return
  end
  count, spent = count + 1, spent + size
  bucket.bytes = bucket.bytes + size
  local k, rest = bucket.count + 1, nil
  if one.held then
    local group, tag = value:byte(97, 98)
    rest = value:sub(23, 98 + tag + group)
  else
    rest = value:sub(23)
    bucket.free[#bucket.free + 1] = id
  end
  bucket.count = k
  bucket.ids[k], bucket.olds[k] = id, value
  bucket.fields[2 * k - 1], bucket.fields[2 * k] = id, (one.new[g] or leased(one, g)) .. rest .. holders[g]
  bucket.times[2 * k - 1], bucket.times[2 * k] = one.text[g], id
  if #holders > 1 then bucket.turns[k] = g - 1 end
end
local function begun()
  return {count = 0, bytes = 0, ids = {}, olds = {}, fields = {}, times = {}, free = {}, turns = {}}
end
local dues = {{}, {}}  -- of each bucket the first that is free and the first that is held; nil where it is to be asked
local function first_due(kind, n)
  local due = dues[kind][n]
  if due == nil then
    local first = redis.call('ZRANGE', KEYS[n] .. (kind == 1 and ':f' or ':h'), 0, 0, 'WITHSCORES')
    due = first[2] or false
    dues[kind][n] = due
  end
  return due
end
local function write(n, bucket, first)  -- first: what was free was the first there
  local base = KEYS[n]
  dues[1][n], dues[2][n] = nil, nil
  if first then
    redis.call('ZREMRANGEBYRANK', base .. ':f', 0, bucket.count - 1)
  else
    spread('ZREM', base .. ':f', bucket.free)
  end
  spread('HSET', base, bucket.fields)
  spread('ZADD', base .. ':h', bucket.times)
  -- A script reads each byte of a string that it handles: large contents are asked for afterwards, by a plain command.
  local small = bucket.bytes < 4096 * bucket.count
  local contents = small and redis.call('HMGET', base .. ':p', unpack(bucket.ids)) or {}
  answer[#answer + 1] = {bucket.ids, bucket.olds, bucket.turns, contents, n - 1}
end

local function take_all(listed, values)  -- of each bucket what is free, all of it
  for n, ids in pairs(listed) do
    local bucket, first = begun(), true
    for i, value in ipairs(values[n]) do
      if full or spent >= MOST_BYTES then break end
      local one = known(value:sub(1, 30))
      if one.odd then
        odd[#odd + 1], odds[#odds + 1] = ids[i], value
        first = false
      elseif one.rests then
        first = false
      else
        take(bucket, ids[i], value, one)
      end
    end
    if bucket.count > 0 then write(n, bucket, first) end
  end
end
local function take_earliest(listed, values, edge)  -- of all buckets what comes first
  local lists, order, touched = {}, {}, {}
  for kind = 1, 2 do
    for n, ids in pairs(listed[kind]) do
      for i, value in ipairs(values[kind][n]) do
        local one = known(value:sub(1, 30))
        local list = lists[one.due]
        if not list then
          list = {}
          lists[one.due] = list
          order[#order + 1] = one.due
        end
        list[#list + 1] = {n = n, id = ids[i], value = value, one = one}
        list.mixed = list.mixed or kind == 2
      end
    end
  end
  table.sort(order)
  for _, due in ipairs(order) do
    if full or count >= most or spent >= MOST_BYTES or due > edge then break end
    local list = lists[due]
    if list.mixed then
      table.sort(list, function(a, b) return a.n < b.n or (a.n == b.n and before(a.id, b.id)) end)
    end
    for _, item in ipairs(list) do
      if item.one.odd then
        odd[#odd + 1], odds[#odds + 1] = item.id, item.value
      elseif not item.one.rests then
        if full or count >= most or spent >= MOST_BYTES then break end
        touched[item.n] = touched[item.n] or begun()
        take(touched[item.n], item.id, item.value, item.one)
      end
    end
  end
  for n, bucket in pairs(touched) do
    if bucket.count > 0 then write(n, bucket) end
  end
end

local per = math.min(most, math.ceil(most / #KEYS) * 2 + 8)
local truncated = false
while not full and count < most and spent < MOST_BYTES do
  local listed, values, met, edge, before_pass = {{}, {}}, {{}, {}}, 0, math.huge, count
  truncated = false
  for n, base in ipairs(KEYS) do
    for kind = 1, 2 do
      local first, ids = first_due(kind, n), {}
      if first and tonumber(first) <= tonumber(ARGV[1 + kind]) then
        ids = redis.call('ZRANGEBYSCORE', base .. (kind == 1 and ':f' or ':h'), '-inf', ARGV[1 + kind],
          'LIMIT', 0, per)
      end
      if #ids > 0 then
        local found = redis.call('HMGET', base, unpack(ids))
        listed[kind][n], values[kind][n], met = ids, found, met + #ids
        if #ids == per then  -- beyond the last there may be earlier ones of that bucket
          truncated, edge = true, math.min(edge, known(found[#found]:sub(1, 30)).due)
        end
      end
    end
  end
  if truncated or count + met > most or next(listed[2]) then
    take_earliest(listed, values, edge)
  else
    take_all(listed[1], values[1])
  end
  if #odd > 0 or not truncated then break end
  if count == before_pass then
    if per >= 2000 then break end
    per = math.min(2 * per, 2000)
  end
end
if (count >= most and most < wanted) or spent >= MOST_BYTES then truncated = true end
local soonest = {'', ''}
if ARGV[5] == '1' then
  for n = 1, #KEYS do
    for kind = 1, 2 do
      local first = first_due(kind, n)
      if first and (soonest[kind] == '' or tonumber(first) < tonumber(soonest[kind])) then soonest[kind] = first end
    end
  end
end
return {answer, odd, odds, truncated and not full and 1 or 0, turn, soonest[1], soonest[2]}
"""
)

__all__ = ["LEASE"]
