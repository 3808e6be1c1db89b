-- Takes a job for one delivery of one stored message. Fenced by (owner, delivery): a later delivery of the same
-- message wins over an earlier one; another message with the same job id waits until the owner's lease has ended.
-- KEYS: execution
-- An execution has one digest, of what its job asks: another job with the same id never gets it.
-- Returns {'conflict', 0}, {'yours', checkpoint or ''}, {'taken', ms until the owner's lease ends} or {'superseded', 0}.
local owner, delivery, lease_ms, keep_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local digest = ARGV[5] -- '' for none
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery', 'lease_until', 'checkpoint', 'digest')
local known_owner, known_delivery, lease_until = known[1], tonumber(known[2]), tonumber(known[3])
if digest ~= '' and known[5] and known[5] ~= digest then
  return {'conflict', 0}
end
if known_owner and known_owner ~= owner and lease_until > now then
  return {'taken', lease_until - now}
end
if known_owner == owner and known_delivery > delivery then
  return {'superseded', 0}
end
redis.call('HSET', KEYS[1], 'owner', owner, 'delivery', delivery, 'lease_until', now + lease_ms)
if digest ~= '' then
  redis.call('HSET', KEYS[1], 'digest', digest)
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return {'yours', known[4] or ''}
