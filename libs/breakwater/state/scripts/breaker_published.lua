-- Records that transitions have been published, unless newer ones have taken their place.
-- KEYS: breaker
-- Returns 1, or 0 where newer ones have.
local transitions = ARGV[1]
if redis.call('HGET', KEYS[1], 'unpublished') == transitions then
  redis.call('HSET', KEYS[1], 'unpublished', '')
  return 1
end
return 0
