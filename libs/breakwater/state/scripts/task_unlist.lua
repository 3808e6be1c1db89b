-- Takes a task off the list of those tripped, unless it has tripped anew meanwhile.
-- KEYS: list   ARGV: name, at_ms as listed
if redis.call('ZSCORE', KEYS[1], ARGV[1]) == ARGV[2] then
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
return 0
