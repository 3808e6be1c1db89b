-- Gives the half-open probe back, if this attempt holds it: it never made its call.
-- KEYS: breaker
-- Returns 1, or 0 where another attempt holds it, or none.
local attempt_id = ARGV[1]
if redis.call('HGET', KEYS[1], 'probe') == attempt_id then
  redis.call('HSET', KEYS[1], 'probe', '', 'probe_until_ms', 0)
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  return 1
end
return 0
