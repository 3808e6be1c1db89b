-- Saves a breaker, if nobody changed it since it was read.
-- KEYS: breaker   ARGV: revision as read, keep_ms (0 = for ever), field, value, field, value, ...
if (redis.call('HGET', KEYS[1], 'revision') or '0') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if ARGV[2] == '0' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
