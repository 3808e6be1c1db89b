-- Saves how far a job is and renews its lease, if it is still ours.
-- KEYS: execution   ARGV: owner, delivery, lease_ms, keep_ms, checkpoint ('' renews only)
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'lease_until', now + tonumber(ARGV[3]))
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'checkpoint', ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
