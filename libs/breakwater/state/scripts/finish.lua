-- Forgets a job whose record stands, if it is still ours.
-- KEYS: execution   ARGV: owner, delivery
local known = redis.call('HMGET', KEYS[1], 'owner', 'delivery')
if known[1] == ARGV[1] and known[2] == ARGV[2] then
  return redis.call('DEL', KEYS[1])
end
return 0
