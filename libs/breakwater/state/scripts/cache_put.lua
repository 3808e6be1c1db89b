-- Caches an answer, and ends its flight if this holder leads it.
-- KEYS: answer, flight
local answer, ttl_ms, holder = ARGV[1], ARGV[2], ARGV[3] -- holder '': none
redis.call('SET', KEYS[1], answer, 'PX', ttl_ms)
if redis.call('GET', KEYS[2]) == holder then
  redis.call('DEL', KEYS[2])
end
return 1
