-- Notes that a call has succeeded, by its event: failures that were published before it are not in a row with later ones.
-- KEYS: breaker
-- Returns 1, or 0 where that changes nothing.
local version, sequence = ARGV[1], tonumber(ARGV[2]) -- version: that let the call pass
local known = redis.call('HMGET', KEYS[1], 'failures', 'last_success', 'state', 'version')
if not known[1] or known[1] == '[]' or known[3] ~= 'closed' or known[4] ~= version then
  return 0
end
if sequence <= tonumber(known[2]) then
  return 0
end
redis.call('HSET', KEYS[1], 'last_success', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'revision', 1)
return 1
