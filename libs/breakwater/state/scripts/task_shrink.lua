-- Holds no more for a job than it has spent, as it is at no call. A job of a life that is over has no hold to shrink.
-- KEYS: task   ARGV: execution, spent
-- Returns whether the hold has shrunk (1 or 0).
local hold = 'h:' .. ARGV[1]
local held = redis.call('HGET', KEYS[1], hold)
if not held or tonumber(held) <= tonumber(ARGV[2]) then
  return 0
end
redis.call('HINCRBY', KEYS[1], 'held_cost', '-' .. held)
redis.call('HDEL', KEYS[1], hold)
if ARGV[2] ~= '0' then
  redis.call('HINCRBY', KEYS[1], 'held_cost', ARGV[2])
  redis.call('HSET', KEYS[1], hold, ARGV[2])
end
return 1
