-- Saves a job's checkpoint and renews the lease of its claim, if that is still ours.
-- KEYS: execution
-- Returns 1, or 0 where it is not.
local owner, delivery, lease_ms, keep_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local checkpoint = ARGV[5] -- '' renews only
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery')
if known[1] ~= owner or known[2] ~= delivery then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'lease_until', now + lease_ms)
if checkpoint ~= '' then
  redis.call('HSET', KEYS[1], 'checkpoint', checkpoint)
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1
