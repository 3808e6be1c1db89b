-- Forgets a task, and returns what it was. That is kept aside for a moment, for a caller that asks again as the answer was
-- lost.
-- KEYS: task, aside   ARGV from the 2nd: fields to read
-- Returns the fields.
local aside_keep_ms, first_field = ARGV[1], 2
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], aside_keep_ms)
end
return redis.call('HMGET', KEYS[2], unpack(ARGV, first_field))
