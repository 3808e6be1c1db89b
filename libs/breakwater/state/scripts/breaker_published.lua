-- Notes that transitions have been published, unless others, which are not, have taken their place.
-- KEYS: breaker   ARGV: transitions
if redis.call('HGET', KEYS[1], 'unpublished') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'unpublished', '')
  return 1
end
return 0
