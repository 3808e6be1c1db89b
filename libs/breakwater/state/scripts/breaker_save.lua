-- Saves a breaker, unless it was changed since it was read.
-- KEYS: breaker
-- Returns 1, or 0 where it was.
local revision_read, keep_ms = ARGV[1], ARGV[2] -- keep_ms 0: it does not expire
local fields_and_values = {unpack(ARGV, 3)}
if (redis.call('HGET', KEYS[1], 'revision') or '0') ~= revision_read then
  return 0
end
redis.call('HSET', KEYS[1], unpack(fields_and_values))
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if keep_ms == '0' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], keep_ms)
end
return 1
