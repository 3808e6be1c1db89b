-- Takes a job for one handling of it, which is named by its token. The holder keeps the claim for as long as it renews it,
-- whatever NATS delivers meanwhile. Once the lease has ended, somebody else takes the job when they have asked twice, grace_ms
-- apart, and the holder has not renewed it in between: Redis itself may have stood still, or its clock have jumped.
-- KEYS: execution; cancel requests for it, and '' where it has children that belong to its task
-- An execution has one digest, of what its job asks: another job with the same id never gets it.
-- Returns {'conflict', 0}, {'yours', checkpoint or '', cancel request…} or {'taken', ms until it may be asked for with success}.
local token, lease_ms, grace_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local keep_ms, digest, tenant, task, owner = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8] -- but for the first '' for none
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'token', 'lease_until', 'asked_at', 'checkpoint', 'digest')
local holder, lease_until, asked_at = known[1], tonumber(known[2]), tonumber(known[3])
if digest ~= '' and known[5] and known[5] ~= digest then
  return {'conflict', 0}
end
if holder and holder ~= token then
  if lease_until > now then
    return {'taken', lease_until - now + grace_ms}
  end
  if not asked_at then
    redis.call('HSET', KEYS[1], 'asked_at', now)
    return {'taken', grace_ms}
  end
  if asked_at + grace_ms > now then
    return {'taken', asked_at + grace_ms - now}
  end
  redis.call('HSET', KEYS[1], 'taken_over', 1)
end
local fields = {'token', token, 'lease_until', now + lease_ms}
for name, value in pairs({digest = digest, tenant = tenant, task = task, owner = owner}) do
  if value ~= '' then
    fields[#fields + 1], fields[#fields + 2] = name, value
  end
end
redis.call('HSET', KEYS[1], unpack(fields))
if asked_at then
  redis.call('HDEL', KEYS[1], 'asked_at')
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return {'yours', known[4] or '', unpack(redis.call('HVALS', KEYS[2]))}
