"""The Lua scripts that the server runs for each call.

A bucket's keys share its hash tag:

    …}           hash: id → packed value (`records.py`)
    …}:p         hash: id → payload and headers
    …}:f :h      sorted sets of free and held ids, by due
    …}:x :k      sorted sets of dead and remembered ids, by death and settling
    …}:e         sorted set of ids that expire, by expiry
    …}:t         sorted set of (size of tag, tag, id), all at 0
    …}:gone      set when the topic was dropped
    …}:i :w      for walks: ids in order, and how far they are

Scripts take any number of buckets; on a cluster the caller gives one. A script that refuses changes nothing. Scripts
delete before they add, so that a server without memory still takes what frees some.

Only walks want ids in order. So a walk puts them in order in `:i`, some thousands per call, and every change maintains
it as long as walks go on. `:w` is `all` when it is complete, else the server's run and the cursor of its hash.
"""

from __future__ import annotations

SUFFIXES = (b":p", b":f", b":h", b":x", b":k", b":e", b":t", b":gone", b":w", b":i")
"""The keys of a bucket beside the first. On a cluster a script is given all of them. If their slot is being moved and
some keys are at the other node already, the node then answers TRYAGAIN, instead of running the script on a part."""

BASES = "local KEYS = KEYS[2] == KEYS[1] .. ':p' and {KEYS[1]} or KEYS\n"

PRELUDE = """
local function spread(name, key, args)
  for at = 1, #args, 4000 do
    redis.call(name, key, unpack(args, at, math.min(at + 3999, #args)))
  end
end
local ZERO = string.rep('\\0', 8)
local texts = {}
local function text(bytes)  -- eight bytes of a time as the server's own commands take it
  local known = texts[bytes]
  if not known then
    known = string.format('%.0f', (struct.unpack('<i8', bytes)))
    texts[bytes] = known
  end
  return known
end
"""

BEFORE = """
local function before(a, b)  -- as bytes: Lua's own < goes by the locale
  for at = 1, math.min(#a, #b) do
    if a:byte(at) ~= b:byte(at) then return a:byte(at) < b:byte(at) end
  end
  return #a < #b
end
"""

VALUES = """
local function values_of(base, ids, first, last, values)  -- adds what stands under ids[first] to ids[last]
  values = values or {}
  for from = first or 1, last or #ids, 4000 do
    local part = redis.call('HMGET', base, unpack(ids, from, math.min(from + 3999, last or #ids)))
    for i = 1, #part do values[#values + 1] = part[i] end
  end
  return values
end
"""

# ── what changes something ──

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
-- Each command that scripts and calls run, once, on keys of its own. Answers those that this user may not run: a right
-- call is answered ERR only by the access control, NOPERM by later versions of it.
local base, refused = KEYS[1], {}
local window, timeline = base .. ':w', base .. ':f'
for _, command in ipairs({
  {'SET', window, '1', 'PX', 1000}, {'GET', window}, {'EXISTS', window}, {'PEXPIRE', window, 1000},
  {'HSET', base, 'a', '1'}, {'HGET', base, 'a'}, {'HMGET', base, 'a'}, {'HVALS', base}, {'HGETALL', base},
  {'HSCAN', base, '0', 'COUNT', 1}, {'HDEL', base, 'a'}, {'ZADD', timeline, 1, 'a'}, {'ZRANGE', timeline, 0, 0},
  {'ZRANGEBYSCORE', timeline, 1, 1}, {'ZRANGEBYLEX', timeline, '-', '+'}, {'ZCOUNT', timeline, 1, 1},
  {'ZSCORE', timeline, 'a'}, {'ZRANK', timeline, 'a'}, {'ZREM', timeline, 'a'}, {'ZREMRANGEBYRANK', timeline, 0, 0},
  {'INFO', 'server'}, {'TIME'}, {'UNLINK', base, window, timeline},
}) do
  local answer = redis.pcall(unpack(command))
  local code = type(answer) == 'table' and answer.err and answer.err:match('^%S+')
  if code == 'ERR' or code == 'NOPERM' then refused[#refused + 1] = command[1] end
end
return refused
"""

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
    one = {version = version, due = due, deliveries = deliveries, holder = size, new = {}, text = {}}
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
  local k, rest = bucket.count + 1, value:sub(23, -1 - one.holder)
  if one.holder == 0 then bucket.free[#bucket.free + 1] = id end
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

WRITING = frozenset((ACK, CHANGE, DROP, LEASE, PUT, SWAP))
"""The scripts that change something: if an answer is lost, they may have done it."""

# ── what only reads ──

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
-- ARGV: ':f' (free) or ':h' (held), then the edges. Answers how many are due between each edge and the next.
local counts, steps, last = {}, #ARGV - 2, '(' .. ARGV[#ARGV]
for step = 1, steps do counts[step] = 0 end
for _, base in ipairs(KEYS) do
  local timeline = base .. ARGV[1]
  local all = redis.call('ZCOUNT', timeline, ARGV[2], last)
  if all > 0 and all < steps then  -- fewer messages than steps: look at each of them
    local found, step = redis.call('ZRANGEBYSCORE', timeline, ARGV[2], last, 'WITHSCORES'), 1
    for at = 2, #found, 2 do
      while tonumber(found[at]) >= tonumber(ARGV[step + 2]) do step = step + 1 end
      counts[step] = counts[step] + 1
    end
  elseif all > 0 and steps > 1 then
    for step = 1, steps do
      counts[step] = counts[step] + redis.call('ZCOUNT', timeline, ARGV[step + 1], '(' .. ARGV[step + 2])
    end
  else
    counts[1] = counts[1] + all
  end
end
return counts
"""

FETCH = (
    VALUES
    + """
-- ARGV for each key: how many, and the ids. Answers the values in order.
local values, at = {}, 1
for _, base in ipairs(KEYS) do
  local last = at + tonumber(ARGV[at])
  values_of(base, ARGV, at + 1, last, values)
  at = last + 1
end
return values
"""
)

RANGE = (
    VALUES
    + """
-- ARGV: how many at most, then suffixes of sorted sets, each with a bound. Answers for each key and each suffix ids and
-- values of what is up to the bound.
local found = {}
for _, base in ipairs(KEYS) do
  for at = 2, #ARGV, 2 do
    local ids = redis.call('ZRANGEBYSCORE', base .. ARGV[at], '-inf', ARGV[at + 1], 'LIMIT', 0, ARGV[1])
    found[#found + 1] = {ids, values_of(base, ids)}
  end
end
return found
"""
)

TAGGED = (
    VALUES
    + """
-- KEYS: one. ARGV: size of tag and tag, the id after which to go on, how many. Answers ids and values.
local start = ARGV[1]
local members = redis.call('ZRANGEBYLEX', KEYS[1] .. ':t', (ARGV[2] == '' and '[' or '(') .. start .. ARGV[2],
  '[' .. start .. string.rep('\\255', 256), 'LIMIT', 0, ARGV[3])
for i = 1, #members do members[i] = members[i]:sub(#start + 1) end
return {members, values_of(KEYS[1], members)}
"""
)

WALK = (
    VALUES
    + """
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
  left = left - #ids
  found[n] = {1, ids, values_of(base, ids)}
  if left <= 0 then break end
end
return found
"""
)

HELD_BY = (
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
