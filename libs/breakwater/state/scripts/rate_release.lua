-- Takes back a call that was never made: nothing of it counts, and the attempt may ask again.
-- KEYS: attempt, then for each limit: counts, calls
local attempt, attempt_id = KEYS[1], ARGV[1]
for k = 2, #KEYS, 2 do
  redis.call('ZREM', KEYS[k + 1], attempt_id)
  local slice, tokens = string.match(redis.call('HGET', attempt, KEYS[k]) or '', '^(%d+)|(%d+)$')
  if slice and redis.call('HEXISTS', KEYS[k], 'r' .. slice) == 1 then
    redis.call('HINCRBY', KEYS[k], 'r' .. slice, -1)
    redis.call('HINCRBY', KEYS[k], 'requests', -1)
    local back = 0 - tonumber(tokens) -- '-0' is no integer to Redis
    redis.call('HINCRBY', KEYS[k], 't' .. slice, back)
    redis.call('HINCRBY', KEYS[k], 'tokens', back)
  end
end
return redis.call('DEL', attempt)
