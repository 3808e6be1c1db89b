-- The scripts of rate limits. KEYS: attempt, then for each limit: counts, calls.

--- admit
-- Admits a call that fits all its limits, and counts it towards each of them; else it counts towards none.
-- Asking again while the lease lasts gives the same answer, counts nothing and renews the lease.
-- ARGV from the 5th, for each limit: ms of a slice of its window, requests, tokens, concurrent calls ('' = none)
-- Returns {1} or {0, index of the refusing limit from 1, its subject, ms until it may fit (-1 = never), calls of that limit
-- under way}.
-- counts: 'r<slice>' and 't<slice>' with the requests and tokens of a slice, 'requests' and 'tokens' with the sums over
-- all slices from 'first' to 'last'. A slice counts until a window after its end: a call never less than a window, and
-- at most a slice more.
-- calls: attempts by the end of their leases.   attempt: 'until', and 'slice|tokens' by the counts it is part of.
local attempt_id, tokens = ARGV[1], tonumber(ARGV[2])
local lease_ms = tonumber(ARGV[3]) -- '': only looks, and counts nothing
local slices, first_limit = tonumber(ARGV[4]), 5
local HOUR_MS = 3600000 -- how long after its lease a call can still be settled, where it counts for longer
local attempt, limits = KEYS[1], (#KEYS - 1) / 2
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local until_ms = now + (lease_ms or 0)

local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms)
  end
end

local function counted(key, slice_ms)
  local slice = math.floor(now / slice_ms)
  local known = redis.call('HMGET', key, 'first', 'last', 'requests', 'tokens', 'r' .. slice, 't' .. slice)
  local over = slice - slices - 1
  local last = tonumber(known[2] or over)
  if last <= over or last > slice + slices then -- ahead by a window: the clock was set back, and the counts mean nothing
    redis.call('DEL', key)
    return {first = slice, last = slice, requests = 0, tokens = 0, r = 0, t = 0, fresh = true, slice_ms = slice_ms}
  end
  if last > slice then -- another server's clock, which was a little ahead
    known[5], known[6] = unpack(redis.call('HMGET', key, 'r' .. last, 't' .. last))
  end
  local sums = {
    first = tonumber(known[1]), last = math.max(last, slice), requests = tonumber(known[3]), tokens = tonumber(known[4]),
    r = tonumber(known[5] or 0), t = tonumber(known[6] or 0), fresh = last < slice, slice_ms = slice_ms,
  }
  if sums.first <= over then
    local fields = {}
    for old = sums.first, over do
      fields[#fields + 1] = 'r' .. old
      fields[#fields + 1] = 't' .. old
    end
    local held = redis.call('HMGET', key, unpack(fields))
    for i = 1, #held, 2 do
      sums.requests = sums.requests - tonumber(held[i] or 0)
      sums.tokens = sums.tokens - tonumber(held[i + 1] or 0)
    end
    sums.first = over + 1
    redis.call('HDEL', key, unpack(fields))
    redis.call('HSET', key, 'first', sums.first, 'requests', sums.requests, 'tokens', sums.tokens)
  end
  return sums
end

-- When the oldest slices that make up the excess will be over. Mostly a few do, so they are read a few at a time.
local function wait(key, kind, sums, excess)
  for from = sums.first, sums.last, 10 do
    local fields = {}
    for old = from, math.min(from + 9, sums.last) do
      fields[#fields + 1] = kind .. old
    end
    for i, count in ipairs(redis.call('HMGET', key, unpack(fields))) do
      excess = excess - tonumber(count or 0)
      if excess <= 0 then
        return (from + i + slices) * sums.slice_ms - now
      end
    end
  end
  return (sums.last + slices + 1) * sums.slice_ms - now
end

local function limit(index)
  local first = first_limit + 4 * (index - 1)
  return tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
end

local asked = redis.call('HGET', attempt, 'until')
if lease_ms and asked and now < tonumber(asked) then
  for k = 3, #KEYS, 2 do
    redis.call('ZADD', KEYS[k], 'XX', 'GT', until_ms, attempt_id) -- XX: it may have been settled
    keep(KEYS[k], lease_ms)
  end
  redis.call('HSET', attempt, 'until', math.max(until_ms, tonumber(asked)))
  keep(attempt, lease_ms)
  return {1}
end

-- Of several that refuse, the one that does so the longest is the answer. A concurrent call may end at any moment.
local refusal
local function refuse(index, what, ms)
  if not refusal or ms > refusal[4] then
    refusal = {0, index, what, ms}
  end
end
local function answer()
  refusal[5] = redis.call('ZCOUNT', KEYS[2 * refusal[2] + 1], '(' .. now, '+inf')
  return refusal
end
local all = {}
for i = 1, limits do
  local _, _, most = limit(i)
  if most and tokens > most then
    return {0, i, 'tokens', -1, 0}
  end
end
for i = 1, limits do
  local key, slice_ms, requests, most = KEYS[2 * i], limit(i)
  local sums = counted(key, slice_ms)
  if requests and sums.requests + 1 > requests then
    refuse(i, 'requests', wait(key, 'r', sums, sums.requests + 1 - requests))
  end
  if most and sums.tokens + tokens > most then
    refuse(i, 'tokens', wait(key, 't', sums, sums.tokens + tokens - most))
  end
  all[i] = sums
end
if refusal then
  return answer()
end
for i = 1, limits do
  local key, _, _, _, most = KEYS[2 * i + 1], limit(i)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local calls = most and redis.call('ZCARD', key) or 0
  if most and calls >= most then
    local ends = redis.call('ZRANGE', key, calls - most, calls - most, 'WITHSCORES')
    refuse(i, 'concurrent_calls', tonumber(ends[2]) - now)
  end
end
if refusal then
  return answer()
end
if not lease_ms then
  return {1}
end

-- Figures without a limit are counted, too: one that is set later holds immediately.
local memory, over_at = {}, until_ms
for i, sums in ipairs(all) do
  local counts, calls, ends = KEYS[2 * i], KEYS[2 * i + 1], (sums.last + slices + 1) * sums.slice_ms
  redis.call('HSET', counts, 'first', sums.first, 'last', sums.last, 'requests', sums.requests + 1,
    'tokens', sums.tokens + tokens, 'r' .. sums.last, sums.r + 1, 't' .. sums.last, sums.t + tokens)
  if sums.fresh then
    redis.call('PEXPIREAT', counts, ends)
  end
  redis.call('ZADD', calls, until_ms, attempt_id)
  keep(calls, lease_ms)
  memory[#memory + 1] = counts
  memory[#memory + 1] = sums.last .. '|' .. tokens
  over_at = math.max(over_at, math.min(ends, until_ms + HOUR_MS))
end
redis.call('HSET', attempt, 'until', until_ms, unpack(memory))
redis.call('PEXPIREAT', attempt, over_at)
return {1}

--- settle
-- Settles a call that has ended: it is under way no more, and counts with the tokens it used. Again, it sets the same
-- figures. Of one that was never made nothing counts, and the attempt may ask again.
-- ARGV from the 2nd, for each limit: the tokens that count; '' = unknown, the worst case stays; 'unmade' = the call was
-- never made, which is so for all limits alike
local attempt, attempt_id = KEYS[1], ARGV[1]
local unmade = ARGV[2] == 'unmade'
for k = 2, #KEYS, 2 do
  local used = ARGV[k / 2 + 1]
  redis.call('ZREM', KEYS[k + 1], attempt_id)
  local slice, tokens = string.match(redis.call('HGET', attempt, KEYS[k]) or '', '^(%d+)|(%d+)$')
  -- A slice that is over has left the sums, or will with all that it holds.
  if slice and used ~= '' and redis.call('HEXISTS', KEYS[k], 't' .. slice) == 1 then
    local more = (tonumber(used) or 0) - tonumber(tokens)
    redis.call('HINCRBY', KEYS[k], 't' .. slice, more)
    redis.call('HINCRBY', KEYS[k], 'tokens', more)
    if unmade then
      redis.call('HINCRBY', KEYS[k], 'r' .. slice, -1)
      redis.call('HINCRBY', KEYS[k], 'requests', -1)
    else
      redis.call('HSET', attempt, KEYS[k], slice .. '|' .. used)
    end
  end
end
return unmade and redis.call('DEL', attempt) or 1
