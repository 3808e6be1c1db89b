-- Charges a reservation at its estimate when its lease has ended and no event tells what the call cost. The event may still
-- come: settling it then corrects the charge. Asked again long after, it is forgotten, and stays charged. Until the lease has
-- ended by Redis' clock nothing happens: somebody else has charged it, or it is held anew.
-- KEYS: reservations, leases, day, month   ARGV: attempt_id, forget at (ms), scope keys...
local time = redis.call('TIME')
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if ends and tonumber(ends) > time[1] * 1000 + math.floor(time[2] / 1000) then
  return 0
end
local held = redis.call('HGET', KEYS[1], ARGV[1])
local state, amount = string.match(held or '', '^(%a)|(%d+)|')
if state ~= 'r' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
for k = 3, 4 do
  -- Counters that are gone were of a period that is long over; and '-0' is no integer to Redis.
  local is_counted = amount ~= '0' and redis.call('EXISTS', KEYS[k]) == 1
  for i = 3, is_counted and #ARGV or 2 do
    redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
    redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], amount)
  end
end
redis.call('HSET', KEYS[1], ARGV[1], 'e' .. string.sub(held, 2))
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
return 1
