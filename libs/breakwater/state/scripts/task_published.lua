-- Records that the event of a task's trip has been published, if it is tripped.
-- KEYS: task
-- Returns when it tripped (ms), or ''.
local at = redis.call('HGET', KEYS[1], 'at_ms')
if at then
  redis.call('HSET', KEYS[1], 'published', 1)
end
return at or ''
