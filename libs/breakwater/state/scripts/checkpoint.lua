-- Saves a job's checkpoint and renews the lease of its claim, if that is still ours. An execution that Redis knows nothing of
-- is still that of its holder: Redis has lost it, and nobody else has asked for the job since.
-- KEYS: execution; cancel requests for it, and '' where it has children that belong to its task
-- Returns 0 where the claim is not ours; else 1, or the values of the second key where there are any.
local token, lease_ms, keep_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3] -- a lease of 0 gives the claim up
local checkpoint = ARGV[4] -- '' renews only
local known = redis.call('HMGET', KEYS[1], 'token', 'asked_at')
if known[1] ~= token and redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local fields = checkpoint ~= '' and {'checkpoint', checkpoint} or {}
if lease_ms == 0 then
  redis.call('HDEL', KEYS[1], 'token', 'lease_until')
else
  local time, n = redis.call('TIME'), #fields
  local lease_until = time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'token', token, 'lease_until', lease_until
end
if #fields > 0 then
  redis.call('HSET', KEYS[1], unpack(fields))
end
if known[2] then
  redis.call('HDEL', KEYS[1], 'asked_at')
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
local cancels = redis.call('HVALS', KEYS[2])
return #cancels > 0 and cancels or 1
