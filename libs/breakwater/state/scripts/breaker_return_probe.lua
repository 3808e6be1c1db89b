-- Gives the half-open probe back, if this attempt holds it: it never made its call.
-- KEYS: breaker   ARGV: attempt_id
if redis.call('HGET', KEYS[1], 'probe') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'probe', '', 'probe_until_ms', 0)
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  return 1
end
return 0
