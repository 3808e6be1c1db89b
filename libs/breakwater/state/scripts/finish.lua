-- Lets go of a job whose record stands, if it is still ours. For a moment it stays taken: a duplicate that looked for the
-- record just before it stood must not begin anew.
-- KEYS: execution   ARGV: owner, delivery, linger_ms
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery')
if known[1] == ARGV[1] and known[2] == ARGV[2] then
  redis.call('HDEL', KEYS[1], 'checkpoint')
  return redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 0
