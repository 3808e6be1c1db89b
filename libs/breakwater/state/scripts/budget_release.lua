-- Gives a reservation back whose call was never made.
-- KEYS: reservations, leases, day, month   ARGV from the 4th: scope keys
-- Returns 1, or 0 where nothing is reserved, in these periods.
local attempt_id, day_name, month_name, first_scope = ARGV[1], ARGV[2], ARGV[3], 4
local reservations, leases = KEYS[1], KEYS[2]
local held = redis.call('HGET', reservations, attempt_id)
if not held then
  return 0
end
local state, amount, day, month = string.match(held, '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|')
if state ~= 'r' or day ~= day_name or month ~= month_name then
  return 0
end
for k = 3, 4 do
  -- Counters that no longer exist were of a period that is long over; and '-0' is no integer to Redis.
  local is_counted = amount ~= '0' and redis.call('EXISTS', KEYS[k]) == 1
  for i = first_scope, is_counted and #ARGV or 0 do
    redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
  end
end
redis.call('HDEL', reservations, attempt_id)
redis.call('ZREM', leases, attempt_id)
return 1
