-- Sets all counters to what the event log says, once: the second caller changes nothing. What calls under way have
-- reserved is kept.
-- KEYS: filled, reservations, held, periods...
-- ARGV from the 7th, for each period: name, keep until (ms), number of fields, then fields and values
-- Returns 1, or 0 where the counters are not filled as the caller believed.
local log, zone, upto, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4] -- alone 1: nothing in it is from another log
local log_before, zone_before = ARGV[5], ARGV[6] -- what they are filled from now; '': they are not filled
local filled, reservations_key, held_key, first_period, first_argument = KEYS[1], KEYS[2], KEYS[3], 4, 7
local known = redis.call('HMGET', filled, 'log', 'zone')
if (known[1] or '') ~= log_before or (known[2] or '') ~= zone_before then
  return 0
end
local period_keys, keep_until, at = {}, {}, first_argument
for k = first_period, #KEYS do
  local name, until_ms, fields, first = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), at + 3
  period_keys[name], keep_until[KEYS[k]] = KEYS[k], until_ms
  redis.call('DEL', KEYS[k])
  at = first + 2 * fields
  for i = first, at - 2, 2 do
    redis.call('HSET', KEYS[k], ARGV[i], ARGV[i + 1])
  end
end
redis.call('DEL', held_key)
local reservations = redis.call('HGETALL', reservations_key)
for i = 2, #reservations, 2 do
  local pattern = '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|((.-)\n([^\n]*)(.*))$'
  local state, amount, day, month, owner, agent, tenant, caller = string.match(reservations[i], pattern)
  if state == 'r' and caller ~= '' and amount ~= '0' then
    redis.call('HINCRBY', held_key, owner, amount)
  end
  for _, period in ipairs({day, month}) do
    for _, key in ipairs({'global', 'agent:' .. agent, tenant ~= '' and 'tenant:' .. tenant or nil}) do
      if period_keys[period] then
        redis.call('HINCRBY', period_keys[period], (state == 'r' and 'reserved:' or 'spent:') .. key, amount)
      end
    end
  end
end
for key, until_ms in pairs(keep_until) do
  redis.call('PEXPIREAT', key, until_ms)
end
redis.call('DEL', filled)
-- A new number with each filling: a repair that was computed before it is refused after it.
local time = redis.call('TIME')
local number = string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('HSET', filled, 'log', log, 'zone', zone, 'upto', upto, 'alone', alone, 'repairs', number)
return 1
