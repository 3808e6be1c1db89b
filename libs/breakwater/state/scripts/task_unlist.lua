-- Takes a task off the list of those tripped, unless it has tripped again meanwhile.
-- KEYS: list
-- Returns 1, or 0 where it has.
local name, listed_at_ms = ARGV[1], ARGV[2]
if redis.call('ZSCORE', KEYS[1], name) == listed_at_ms then
  return redis.call('ZREM', KEYS[1], name)
end
return 0
