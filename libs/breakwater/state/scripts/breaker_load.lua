-- Reads a breaker.
-- Returns {now in ms, its fields and values in turn}.
-- KEYS: breaker
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
return {now, redis.call('HGETALL', KEYS[1])}
