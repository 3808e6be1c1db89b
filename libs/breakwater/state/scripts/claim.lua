-- Takes a job for one delivery of one stored message. Fenced by (owner, delivery): a later delivery of the same
-- message wins over an earlier one; another message with the same job id waits until the owner's lease has ended.
-- KEYS: execution   ARGV: owner, delivery, lease_ms, keep_ms
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery', 'lease_until', 'checkpoint')
local owner, delivery, lease_until = known[1], tonumber(known[2]), tonumber(known[3])
if owner and owner ~= ARGV[1] and lease_until > now then
  return {'taken', lease_until - now}
end
if owner == ARGV[1] and delivery > tonumber(ARGV[2]) then
  return {'superseded', 0}
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'delivery', ARGV[2], 'lease_until', now + tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'yours', known[4] or ''}
