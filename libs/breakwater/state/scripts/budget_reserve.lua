-- Holds the worst case of a call against all its budgets, or against none. Asking again holds it once, and renews the lease.
-- KEYS: reservations, leases, filled, day, month
-- ARGV: attempt_id, amount, lease_ms, at ('' = now), day, month (names), day's start, end, month's start, end, keep day until,
--       keep month until (ms), owner, then for each scope: key, hard limit of the day, of the month ('' = none)
-- Returns {1, when it was reserved} or {0, index of the refusing scope from 1, 'daily' or 'monthly', limit, spent, reserved},
-- {2, now} where that is in another day or month, {3} where the counters are lost and a cap could not be held.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', KEYS[1], ARGV[1])
local state, before, since, day, month
if held then
  state, before, since, day, month = string.match(held, '^(%a)|(%d+)|(%d+)|([^|]+)|([^|]+)|')
  if state == 'e' or before == ARGV[2] or day ~= ARGV[5] or month ~= ARGV[6] then
    if state == 'r' then
      redis.call('ZADD', KEYS[2], 'GT', now + tonumber(ARGV[3]), ARGV[1])
    end
    return {1, since}
  end
end
local at = tonumber(since or ARGV[4]) or now
if at < tonumber(ARGV[7]) or at >= tonumber(ARGV[8]) or at < tonumber(ARGV[9]) or at >= tonumber(ARGV[10]) then
  return {2, now}
end
-- Of another amount it was reserved for another model, by a worker that lost the job: the difference is what is asked for.
local amount, filled = tonumber(ARGV[2]) - tonumber(before or '0'), false
for i = 14, #ARGV, 3 do
  for window = 1, 2 do
    local cap = ARGV[i + window]
    if cap ~= '' then
      filled = filled or redis.call('HEXISTS', KEYS[3], 'log') == 1
      if not filled then
        return {3}
      end
      local known = redis.call('HMGET', KEYS[3 + window], 'spent:' .. ARGV[i], 'reserved:' .. ARGV[i], 'cap:' .. ARGV[i])
      local spent, reserved = tonumber(known[1] or '0'), tonumber(known[2] or '0')
      local limit = tonumber(cap)
      local raised, over = string.match(known[3] or '', '^(%d+):(%d+)$') -- by a person, over a cap that may have changed since
      if over == cap then
        limit = math.max(limit, tonumber(raised))
      end
      if amount > limit - spent - reserved then -- added up, they might be more than a double counts exactly
        return {0, (i - 11) / 3, window == 1 and 'daily' or 'monthly', string.format('%.0f', limit), known[1] or '0', known[2] or '0'}
      end
    end
  end
end
for window = 1, 2 do
  for i = 14, #ARGV, 3 do
    redis.call('HINCRBY', KEYS[3 + window], 'reserved:' .. ARGV[i], string.format('%.0f', amount))
  end
  redis.call('PEXPIREAT', KEYS[3 + window], ARGV[10 + window])
end
at = string.format('%.0f', at)
-- state 'r': reserved; 'e': its lease ended and it was charged at the estimate.
redis.call('HSET', KEYS[1], ARGV[1], table.concat({'r', ARGV[2], at, ARGV[5], ARGV[6], ARGV[13]}, '|'))
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[1])
return {1, at}
