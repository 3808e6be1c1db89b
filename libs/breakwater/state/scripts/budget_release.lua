-- Gives a reservation back whose call was never made.
-- KEYS: reservations, leases, day, month   ARGV: attempt_id, day, month (names), scope keys...
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held then
  return 0
end
local state, amount, day, month = string.match(held, '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|')
if state ~= 'r' or day ~= ARGV[2] or month ~= ARGV[3] then
  return 0
end
for k = 3, 4 do
  -- Counters that are gone were of a period that is long over; and '-0' is no integer to Redis.
  local is_counted = amount ~= '0' and redis.call('EXISTS', KEYS[k]) == 1
  for i = 4, is_counted and #ARGV or 3 do
    redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
  end
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
