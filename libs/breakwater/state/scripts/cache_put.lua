-- Keeps an answer, and lets go of its question if this holder leads.
-- KEYS: answer, flight   ARGV: answer, ttl_ms, holder ('' for none)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if redis.call('GET', KEYS[2]) == ARGV[3] then
  redis.call('DEL', KEYS[2])
end
return 1
