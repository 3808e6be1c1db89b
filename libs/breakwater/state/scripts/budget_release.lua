-- Ends a reservation: gives it back where its call was never made, or charges what the call has cost in its place until the
-- attempt's event settles it.
-- KEYS: reservations, leases, day, month, held   ARGV from the 5th: scope keys
-- Returns 1, or 0 where nothing is reserved, in these periods.
local attempt_id, day_name, month_name, first_scope = ARGV[1], ARGV[2], ARGV[3], 5
local cost = ARGV[4] -- nano-dollars; '': the call was never made
local reservations, leases = KEYS[1], KEYS[2]
local held = redis.call('HGET', reservations, attempt_id)
if not held then
  return 0
end
local state, amount, rest, day, month, owner = string.match(held, '^(%a)|(%d+)(|%d+|([^|]+)|([^|]+)|(.*))$')
if state ~= 'r' or day ~= day_name or month ~= month_name then
  return 0
end
for k = 3, 4 do
  -- Counters that no longer exist were of a period that is long over; and '-0' is no integer to Redis.
  local is_counted = redis.call('EXISTS', KEYS[k]) == 1
  for i = first_scope, is_counted and #ARGV or 0 do
    if amount ~= '0' then
      redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
    end
    if cost ~= '' and cost ~= '0' then
      redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], cost)
    end
  end
end
-- Of an owner with a caller, a share is counted (see budget_reserve).
if amount ~= '0' and string.find(owner, '\n.*\n') and redis.call('HINCRBY', KEYS[5], owner, '-' .. amount) <= 0 then
  redis.call('HDEL', KEYS[5], owner)
end
if cost == '' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
else
  redis.call('HSET', reservations, attempt_id, 's|' .. cost .. rest)
end
return 1
