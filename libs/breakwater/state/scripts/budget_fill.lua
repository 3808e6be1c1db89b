-- Sets all counters to what the record says, once: whoever comes second changes nothing. What calls under way hold stays.
-- KEYS: filled, reservations, periods...
-- ARGV: log, zone, upto, alone (1: nothing of it is from elsewhere), log and zone that are filled now ('' = none), then for
--       each period: name, keep until (ms), number of fields, then fields and values
local known = redis.call('HMGET', KEYS[1], 'log', 'zone')
if (known[1] or '') ~= ARGV[5] or (known[2] or '') ~= ARGV[6] then
  return 0
end
local place, keep, at = {}, {}, 7
for k = 3, #KEYS do
  place[ARGV[at]], keep[KEYS[k]] = KEYS[k], ARGV[at + 1]
  redis.call('DEL', KEYS[k])
  local first = at + 3
  at = first + 2 * tonumber(ARGV[at + 2])
  for i = first, at - 2, 2 do
    redis.call('HSET', KEYS[k], ARGV[i], ARGV[i + 1])
  end
end
local reservations = redis.call('HGETALL', KEYS[2])
for i = 2, #reservations, 2 do
  local pattern = '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|(.-)\n(.*)$'
  local state, amount, day, month, agent, tenant = string.match(reservations[i], pattern)
  for _, period in ipairs({day, month}) do
    for _, key in ipairs({'global', 'agent:' .. agent, tenant ~= '' and 'tenant:' .. tenant or nil}) do
      if place[period] then
        redis.call('HINCRBY', place[period], (state == 'r' and 'reserved:' or 'spent:') .. key, amount)
      end
    end
  end
end
for key, until_ms in pairs(keep) do
  redis.call('PEXPIREAT', key, until_ms)
end
redis.call('DEL', KEYS[1])
-- Another one with each filling: what was read before it repairs nothing after it.
local time = redis.call('TIME')
local number = string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('HSET', KEYS[1], 'log', ARGV[1], 'zone', ARGV[2], 'upto', ARGV[3], 'alone', ARGV[4], 'repairs', number)
return 1
