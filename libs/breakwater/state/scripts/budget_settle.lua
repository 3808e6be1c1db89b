-- Replaces a reservation by what the call cost. Once for each event of the log, known by its bit.
-- KEYS: reservations, leases, filled, applied block, day, month
-- ARGV: attempt_id, log, zone, sequence, bit, block keep_ms, day, month (names), keep day until, keep month until (ms),
--       number of figures, then names and values of the figures, then scope keys...
-- Returns {counted (1) or seen before (0), spent and raised cap ('' = none) of each scope in the day, then in the month},
-- {2, day, month} where it is reserved in other periods, {3} where the counters are not those of this log.
local filled = redis.call('HMGET', KEYS[3], 'log', 'zone', 'upto')
if filled[1] ~= ARGV[2] or filled[2] ~= ARGV[3] then
  return {3}
end
local scopes = 12 + 2 * tonumber(ARGV[11])
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held then
  local state, amount, day, month = string.match(held, '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|')
  if day ~= ARGV[7] or month ~= ARGV[8] then
    return {2, day, month}
  end
  local field = state == 'r' and 'reserved:' or 'spent:'
  for k = 5, 6 do
    for i = scopes, amount == '0' and 0 or #ARGV do -- '-0' is no integer to Redis
      redis.call('HINCRBY', KEYS[k], field .. ARGV[i], '-' .. amount)
    end
  end
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
local counted = tonumber(ARGV[4]) > tonumber(filled[3]) and 1 - redis.call('SETBIT', KEYS[4], ARGV[5], 1) or 0
if counted == 1 then
  redis.call('PEXPIRE', KEYS[4], ARGV[6])
  for k = 5, 6 do
    for i = scopes, #ARGV do
      for f = 12, scopes - 1, 2 do
        redis.call('HINCRBY', KEYS[k], ARGV[f] .. ':' .. ARGV[i], ARGV[f + 1])
      end
    end
  end
end
local answer = {counted}
for k = 5, 6 do
  redis.call('PEXPIREAT', KEYS[k], ARGV[k + 4]) -- at once where the period is long over
  for i = scopes, #ARGV do
    local known = redis.call('HMGET', KEYS[k], 'spent:' .. ARGV[i], 'cap:' .. ARGV[i])
    answer[#answer + 1] = known[1] or '0'
    answer[#answer + 1] = known[2] or ''
  end
end
return answer
