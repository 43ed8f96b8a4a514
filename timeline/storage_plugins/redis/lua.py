"""What several scripts begin with."""

from __future__ import annotations

SUFFIXES = (b":p", b":f", b":h", b":x", b":k", b":e", b":t", b":gone", b":w", b":i")
"""The keys of a bucket beside the first. On a cluster a script is told all of them: while their slot is being moved to
another node, and some are there already, the node then answers TRYAGAIN instead of running it on a part of them."""

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

__all__ = ["BASES", "BEFORE", "PRELUDE", "SUFFIXES"]
