-- Notes that a call has succeeded whose event is about to be published: all failures that are known came before it.
-- KEYS: breaker
-- Returns 1, or 0 where that changes nothing.
local version = ARGV[1] -- that let the call pass
local known = redis.call('HMGET', KEYS[1], 'failures', 'last_success', 'state', 'version')
if not known[1] or known[1] == '[]' or known[3] ~= 'closed' or known[4] ~= version then
  return 0
end
local latest = 0
for sequence in string.gmatch(known[1], '%[(%d+),') do
  latest = math.max(latest, tonumber(sequence))
end
if latest <= tonumber(known[2]) then
  return 0
end
redis.call('HSET', KEYS[1], 'last_success', string.format('%.0f', latest))
redis.call('HINCRBY', KEYS[1], 'revision', 1)
return 1
