-- Ends the claim of a job whose record is published, if it is still ours. It lingers for a moment: a duplicate that looked for
-- the record just before it was published must not run the job again.
-- KEYS: execution
-- Returns 1, or 0 where it is not ours.
local owner, delivery, linger_ms = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery')
if known[1] == owner and known[2] == delivery then
  redis.call('HDEL', KEYS[1], 'checkpoint')
  return redis.call('PEXPIRE', KEYS[1], linger_ms)
end
return 0
