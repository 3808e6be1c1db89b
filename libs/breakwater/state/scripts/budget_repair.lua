-- Adds to counters what they lack, unless they were filled or repaired since they were read.
-- KEYS: filled, periods...
-- ARGV from the 5th, four for each addition: index of the period from 1, keep until (ms), field, amount to add
-- Returns 1, or 0 where they were.
local log, zone, repairs, first_addition = ARGV[1], ARGV[2], ARGV[3], 5
local upto = ARGV[4] -- the last event that is counted now
local filled = KEYS[1]
local known = redis.call('HMGET', filled, 'log', 'zone', 'repairs', 'upto')
if known[1] ~= log or known[2] ~= zone or known[3] ~= repairs then
  return 0
end
for i = first_addition, #ARGV, 4 do
  local period, keep_until_ms, field, amount = KEYS[1 + tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  redis.call('HINCRBY', period, field, amount)
  redis.call('PEXPIREAT', period, keep_until_ms)
end
if tonumber(upto) > tonumber(known[4]) then
  redis.call('HSET', filled, 'upto', upto)
end
redis.call('HINCRBY', filled, 'repairs', 1)
return 1
