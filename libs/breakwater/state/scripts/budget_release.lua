-- Gives a reservation back whose call was never made.
-- KEYS: reservations, leases, day, next day, month, next month   ARGV: attempt_id, names as in reserve (4), budget keys...
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held then
  return 0
end
local state, amount, day, month = string.match(held, '^(%a)|(%d+)|([^|]+)|([^|]+)|')
if state ~= 'r' then
  return 0
end
local periods = {day == ARGV[2] and KEYS[3] or KEYS[4], month == ARGV[4] and KEYS[5] or KEYS[6]}
for _, key in ipairs(periods) do
  for i = 6, amount == '0' and 5 or #ARGV do -- '-0' is no integer to Redis
    redis.call('HINCRBY', key, 'reserved:' .. ARGV[i], '-' .. amount)
  end
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
