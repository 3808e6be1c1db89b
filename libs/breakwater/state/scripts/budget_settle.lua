-- Replaces a reservation by what the call cost, once for each event of the log: each has a bit in a block.
-- KEYS: reservations, leases, filled, applied block, day, month
-- ARGV from the 12th: names and values of the figures, then scope keys
-- Returns {counted (1) or seen before (0), spent and raised cap ('' = none) of each scope in the day, then in the month},
-- {2, day, month} where it is reserved in other periods, {3} where the counters are not those of this log.
local attempt_id, log, zone, sequence, bit, block_keep_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local day_name, month_name, first_figure = ARGV[7], ARGV[8], 12
local first_scope = first_figure + 2 * tonumber(ARGV[11])
local reservations, leases, filled_key, block = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local periods, keep_until_ms = {KEYS[5], KEYS[6]}, {ARGV[9], ARGV[10]} -- the day and the month
local filled = redis.call('HMGET', filled_key, 'log', 'zone', 'upto')
if filled[1] ~= log or filled[2] ~= zone then
  return {3}
end
local held = redis.call('HGET', reservations, attempt_id)
if held then
  local state, amount, day, month = string.match(held, '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|')
  if day ~= day_name or month ~= month_name then
    return {2, day, month}
  end
  local field = state == 'r' and 'reserved:' or 'spent:'
  for _, period in ipairs(periods) do
    for i = first_scope, amount == '0' and 0 or #ARGV do -- '-0' is no integer to Redis
      redis.call('HINCRBY', period, field .. ARGV[i], '-' .. amount)
    end
  end
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
end
local counted = sequence > tonumber(filled[3]) and 1 - redis.call('SETBIT', block, bit, 1) or 0
if counted == 1 then
  redis.call('PEXPIRE', block, block_keep_ms)
  for _, period in ipairs(periods) do
    for i = first_scope, #ARGV do
      for f = first_figure, first_scope - 1, 2 do
        redis.call('HINCRBY', period, ARGV[f] .. ':' .. ARGV[i], ARGV[f + 1])
      end
    end
  end
end
local answer = {counted}
for window, period in ipairs(periods) do
  redis.call('PEXPIREAT', period, keep_until_ms[window]) -- at once where the period is long over
  for i = first_scope, #ARGV do
    local known = redis.call('HMGET', period, 'spent:' .. ARGV[i], 'cap:' .. ARGV[i])
    answer[#answer + 1] = known[1] or '0'
    answer[#answer + 1] = known[2] or ''
  end
end
return answer
