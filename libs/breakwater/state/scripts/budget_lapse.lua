-- Charges a reservation at its estimate when its lease has ended and no event tells what the call cost.
-- The event may still come: settling it then corrects the charge.
-- KEYS: reservations, leases, day, month   ARGV: attempt_id, budget keys...
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held or string.sub(held, 1, 1) ~= 'r' then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
local amount = string.match(held, '^%a|(%d+)|')
for k = 3, 4 do
  for i = 2, amount == '0' and 1 or #ARGV do -- '-0' is no integer to Redis
    redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
    redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], amount)
  end
end
redis.call('HSET', KEYS[1], ARGV[1], 'e' .. string.sub(held, 2))
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
