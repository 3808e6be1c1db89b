-- Adds to counters what they lack, unless they were filled or repaired since they were read.
-- KEYS: filled, periods...
-- ARGV: log, zone, repairs, upto (events up to it are counted now), then: index of the period from 1, keep until (ms), field,
--       what to add...
local known = redis.call('HMGET', KEYS[1], 'log', 'zone', 'repairs', 'upto')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] or known[3] ~= ARGV[3] then
  return 0
end
for i = 5, #ARGV, 4 do
  local period = KEYS[1 + tonumber(ARGV[i])]
  redis.call('HINCRBY', period, ARGV[i + 2], ARGV[i + 3])
  redis.call('PEXPIREAT', period, ARGV[i + 1])
end
if tonumber(ARGV[4]) > tonumber(known[4]) then
  redis.call('HSET', KEYS[1], 'upto', ARGV[4])
end
redis.call('HINCRBY', KEYS[1], 'repairs', 1)
return 1
