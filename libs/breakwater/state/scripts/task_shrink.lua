-- Holds no more for a job than it has spent, as it is at no call. A job of a life that is over has no hold to shrink.
-- KEYS: task
-- Returns whether the hold has shrunk (1 or 0).
local task, execution, spent = KEYS[1], ARGV[1], ARGV[2]
local hold = 'h:' .. execution
local held = redis.call('HGET', task, hold)
if not held or tonumber(held) <= tonumber(spent) then
  return 0
end
redis.call('HINCRBY', task, 'held_cost', '-' .. held)
redis.call('HDEL', task, hold)
if spent ~= '0' then
  redis.call('HINCRBY', task, 'held_cost', spent)
  redis.call('HSET', task, hold, spent)
end
return 1
