-- Ends a flight without an answer, if this holder leads it.
-- KEYS: flight
-- Returns 1, or 0 where it does not.
local holder = ARGV[1]
if redis.call('GET', KEYS[1]) == holder then
  return redis.call('DEL', KEYS[1])
end
return 0
