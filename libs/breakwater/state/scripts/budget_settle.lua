-- Replaces a reservation by what the call cost. Once for each event of the log, known by its bit.
-- KEYS: reservations, leases, applied block, day, month
-- ARGV: attempt_id, bit, cost ('' = unknown), keep_ms, day end, month end (ms), block keep_ms, budget keys...
-- Returns {applied (1) or seen before (0), spent for each budget key in the day, then in the month}.
local applied = 1 - redis.call('SETBIT', KEYS[3], ARGV[2], 1)
if applied == 1 then
  redis.call('PEXPIRE', KEYS[3], ARGV[7])
  local held = redis.call('HGET', KEYS[1], ARGV[1])
  local state, amount = 'none', '0'
  if held then
    state, amount = string.match(held, '^(%a)|(%d+)|')
  end
  if amount == '0' then
    state = 'none' -- '-0' is no integer to Redis
  end
  for k = 4, 5 do
    for i = 8, #ARGV do
      if state == 'r' then
        redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
      elseif state == 'e' then
        redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], '-' .. amount)
      end
      if ARGV[3] == '' then
        redis.call('HINCRBY', KEYS[k], 'unpriced:' .. ARGV[i], 1)
      else
        redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], ARGV[3])
      end
      redis.call('HINCRBY', KEYS[k], 'calls:' .. ARGV[i], 1)
    end
    redis.call('PEXPIREAT', KEYS[k], tonumber(ARGV[k + 1]) + tonumber(ARGV[4]))
  end
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
if applied == 0 then
  -- Counted before: a reservation that stands under this attempt all the same is nobody's. A duplicate made it.
  local held = redis.call('HGET', KEYS[1], ARGV[1])
  if held then
    local state, amount = string.match(held, '^(%a)|(%d+)|')
    for k = 4, 5 do
      for i = 8, amount == '0' and 7 or #ARGV do
        redis.call('HINCRBY', KEYS[k], (state == 'r' and 'reserved:' or 'spent:') .. ARGV[i], '-' .. amount)
      end
    end
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('ZREM', KEYS[2], ARGV[1])
  end
end
local answer = {applied}
for k = 4, 5 do
  for i = 8, #ARGV do
    answer[#answer + 1] = redis.call('HGET', KEYS[k], 'spent:' .. ARGV[i]) or '0'
  end
end
return answer
