"""The script of a lease: finds what is due in any number of buckets, deals it, and writes it down, in one call."""

from __future__ import annotations

from timeline.storage_plugins.redis.lua import BEFORE, PRELUDE

LEASE = (
    PRELUDE
    + BEFORE
    + """
-- ARGV: now, free until, held until, most deliveries (0: any), '1' to tell what comes next, whose turn it is, then of
-- each grant: holder, count, length in ms, bytes, '1' where alone.
-- Takes the earliest by (due, id), dealt in turn. Answers: ids, values as they were, contents, turns, ids and values
-- of what was met that has expired or was delivered out, whether there may be more, whose turn it is then, the
-- earliest due of what is free and of what is held.
local now, limit, wanted, turn = tonumber(ARGV[1]), tonumber(ARGV[4]), 0, tonumber(ARGV[6])
local holders, counts, lengths, room, alone = {}, {}, {}, {}, {}
for at = 7, #ARGV, 5 do
  local g = #holders + 1
  holders[g], counts[g], lengths[g] = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  room[g], alone[g] = tonumber(ARGV[at + 3]), ARGV[at + 4] == '1'
  wanted = wanted + counts[g]
end
local most = math.min(wanted, 2000)  -- so many at once, and 4 MiB: others wait meanwhile

local memo, weights = {}, {}
local function known(start)  -- what the first 22 bytes of a value say
  local one = memo[start]
  if not one then
    local version, due, deliveries, size = struct.unpack('<i8i8I4I1', start)
    one = {version = version, due = due, deliveries = deliveries, size = size, new = {}, text = {}}
    one.spent = limit > 0 and deliveries >= limit
    memo[start] = one
  end
  return one
end
local function leased(one, g)  -- the first 22 bytes once grant g has it
  local new = one.new[g]
  if not new then
    local due = math.max(now, one.due) + lengths[g]
    new = struct.pack('<i8i8I4I1I1', one.version + 1, due, one.deliveries + 1, #holders[g], 2)
    one.new[g], one.text[g] = new, string.format('%.0f', due)
  end
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

local ids, olds, contents, turns, odd, odds = {}, {}, {}, {}, {}, {}
local per = math.min(most, math.ceil(most / #KEYS) * 2 + 8)
local full, truncated, spent = wanted == 0, false, 0
while not full and #ids < most and spent < 4194304 do
  local lists, order, edge = {}, {}, nil
  truncated = false
  for n, base in ipairs(KEYS) do
    for kind = 1, 2 do
      local listed = redis.call('ZRANGEBYSCORE', base .. (kind == 1 and ':f' or ':h'), '-inf', ARGV[1 + kind],
        'LIMIT', 0, per)
      local last
      local values = #listed > 0 and redis.call('HMGET', base, unpack(listed)) or {}
      for i, value in ipairs(values) do
        local one = known(value:sub(1, 22))
        last = one.due
        local list = lists[last]
        if not list then
          list = {n = {}, id = {}, value = {}, one = {}, kinds = 0}
          lists[last] = list
          order[#order + 1] = last
        end
        local at = #list.n + 1
        list.n[at], list.id[at], list.value[at], list.one[at] = n, listed[i], value, one
        if list.kinds ~= kind then list.kinds = list.kinds + kind end
      end
      if #listed == per then
        truncated = true
        edge = math.min(edge or last, last)  -- beyond it there may be earlier ones of that bucket
      end
    end
  end
  table.sort(order)
  local touched, before_pass = {}, #ids
  for _, due in ipairs(order) do
    if full or #ids >= most or (edge and due > edge) then break end
    local list, sorted = lists[due], nil
    if list.kinds > 2 then
      sorted = {}
      for at = 1, #list.n do sorted[at] = at end
      table.sort(sorted, function(a, b)
        if list.n[a] ~= list.n[b] then return list.n[a] < list.n[b] end
        return before(list.id[a], list.id[b])
      end)
    end
    for number = 1, #list.n do
      local at = sorted and sorted[number] or number
      local one, value, id = list.one[at], list.value[at], list.id[at]
      local expires = value:sub(63, 70)
      if (expires ~= ZERO and struct.unpack('<i8', expires) <= now) or (one.spent and due <= now) then
        odd[#odd + 1], odds[#odds + 1] = id, value
      elseif not one.spent then
        local weight = value:sub(87, 94)
        local size = weights[weight]
        if not size then
          local payload, headers = struct.unpack('<I4I4', weight)
          size = payload + headers
          weights[weight] = size
        end
        if #ids >= most or spent >= 4194304 then
          truncated = true
          break
        end
        local g = deal(size)
        if not g then
          full = true
          break
        end
        spent = spent + size
        local bucket = touched[list.n[at]]
        if not bucket then
          bucket = {ids = {}, fields = {}, times = {}, free = {}, places = {}}
          touched[list.n[at]] = bucket
        end
        local k = #bucket.ids + 1
        local new, rest = leased(one, g), value:sub(23)
        if one.size > 0 then
          local group, tag = value:byte(97, 98)
          rest = value:sub(23, 98 + tag + group)
        else
          bucket.free[#bucket.free + 1] = id
        end
        local place = #ids + 1
        ids[place], olds[place], turns[place] = id, value, g - 1
        bucket.ids[k], bucket.places[k] = id, place
        bucket.fields[2 * k - 1], bucket.fields[2 * k] = id, new .. rest .. holders[g]
        bucket.times[2 * k - 1], bucket.times[2 * k] = one.text[g], id
      end
    end
  end
  for n, bucket in pairs(touched) do
    local base = KEYS[n]
    spread('ZREM', base .. ':f', bucket.free)
    spread('HSET', base, bucket.fields)
    spread('ZADD', base .. ':h', bucket.times)
    local found = redis.call('HMGET', base .. ':p', unpack(bucket.ids))
    for k, place in ipairs(bucket.places) do contents[place] = found[k] end
  end
  if #odd > 0 or not truncated then break end
  if #ids == before_pass then
    if per >= 2000 then break end
    per = math.min(2 * per, 2000)
  end
end
if (#ids >= most and most < wanted) or spent >= 4194304 then truncated = true end
local soonest = {'', ''}
if ARGV[5] == '1' then
  for _, base in ipairs(KEYS) do
    for kind = 1, 2 do
      local first = redis.call('ZRANGE', base .. (kind == 1 and ':f' or ':h'), 0, 0, 'WITHSCORES')[2]
      if first and (soonest[kind] == '' or tonumber(first) < tonumber(soonest[kind])) then soonest[kind] = first end
    end
  end
end
return {ids, olds, contents, turns, odd, odds, truncated and not full and 1 or 0, turn, soonest[1], soonest[2]}
"""
)

__all__ = ["LEASE"]
