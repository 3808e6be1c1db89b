-- Holds the worst case of a call against all its budgets, or against none. Asking again gives the same answer.
-- KEYS: reservations, leases, day, next day, month, next month
-- ARGV: attempt_id, amount, lease_ms, day, next day, month, next month (names), day end, next day end, month end,
--       next month end (ms), keep_ms, agent token, then for each budget: window ('daily' or 'monthly'), key, hard limit ('' = none)
-- Returns {1} or {0, index of the refusing budget from 1, end of its period in ms, limit, spent, reserved}.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
  return {1}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local day = now < tonumber(ARGV[8]) and 1 or 2
local month = now < tonumber(ARGV[10]) and 1 or 2
local period = {daily = KEYS[2 + day], monthly = KEYS[4 + month]}
local ends = {daily = tonumber(ARGV[7 + day]), monthly = tonumber(ARGV[9 + month])}
local amount = tonumber(ARGV[2])
for i = 14, #ARGV, 3 do
  if ARGV[i + 2] ~= '' then
    local held = redis.call('HMGET', period[ARGV[i]], 'spent:' .. ARGV[i + 1], 'reserved:' .. ARGV[i + 1])
    local spent, reserved = tonumber(held[1] or '0'), tonumber(held[2] or '0')
    if spent + reserved + amount > tonumber(ARGV[i + 2]) then
      return {0, (i - 11) / 3, ends[ARGV[i]], ARGV[i + 2], held[1] or '0', held[2] or '0'}
    end
  end
end
for i = 14, #ARGV, 3 do
  redis.call('HINCRBY', period[ARGV[i]], 'reserved:' .. ARGV[i + 1], ARGV[2])
end
for window, key in pairs(period) do
  redis.call('PEXPIREAT', key, ends[window] + tonumber(ARGV[12]))
end
-- state 'r': reserved; 'e': its lease ended and it was charged at the estimate.
redis.call('HSET', KEYS[1], ARGV[1], 'r|' .. ARGV[2] .. '|' .. ARGV[3 + day] .. '|' .. ARGV[5 + month] .. '|' .. ARGV[13])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[1])
return {1}
