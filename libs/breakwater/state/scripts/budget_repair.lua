-- Adds to counters what they lack, unless they were filled or repaired since they were read.
-- KEYS: filled, periods...   ARGV: log, zone, repairs, then: index of the period from 1, field, what to add...
local known = redis.call('HMGET', KEYS[1], 'log', 'zone', 'repairs')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] or known[3] ~= ARGV[3] then
  return 0
end
for i = 4, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[1 + tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
redis.call('HINCRBY', KEYS[1], 'repairs', 1)
return 1
