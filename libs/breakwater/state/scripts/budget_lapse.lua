-- Charges a reservation at its estimate when its lease has ended and no event has reported the actual cost. The event may
-- still come: settling it then corrects the charge. Called again long after, it forgets the reservation, which stays charged.
-- Until the lease has ended by Redis' clock nothing happens: another caller has charged it, or it was reserved again.
-- KEYS: reservations, leases, day, month, held   ARGV from the 3rd: scope keys
local attempt_id, forget_at_ms, first_scope = ARGV[1], ARGV[2], 3
local reservations, leases = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local ends = redis.call('ZSCORE', leases, attempt_id)
if ends and tonumber(ends) > time[1] * 1000 + math.floor(time[2] / 1000) then
  return 0
end
local held = redis.call('HGET', reservations, attempt_id)
local state, amount, owner = string.match(held or '', '^(%a)|(%d+)|%d+|[^|]+|[^|]+|(.*)$')
if state == 's' then -- its worker has charged what it cost, and died before it could record that
  redis.call('HSET', reservations, attempt_id, 'e' .. string.sub(held, 2))
  redis.call('ZADD', leases, forget_at_ms, attempt_id)
  return 0
end
if state ~= 'r' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
  return 0
end
for k = 3, 4 do
  -- Counters that no longer exist were of a period that is long over; and '-0' is no integer to Redis.
  local is_counted = amount ~= '0' and redis.call('EXISTS', KEYS[k]) == 1
  for i = first_scope, is_counted and #ARGV or 0 do
    redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
    redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], amount)
  end
end
-- Of an owner with a caller, a share is counted (see budget_reserve).
if amount ~= '0' and string.find(owner, '\n.*\n') and redis.call('HINCRBY', KEYS[5], owner, '-' .. amount) <= 0 then
  redis.call('HDEL', KEYS[5], owner)
end
redis.call('HSET', reservations, attempt_id, 'e' .. string.sub(held, 2))
redis.call('ZADD', leases, forget_at_ms, attempt_id)
return 1
