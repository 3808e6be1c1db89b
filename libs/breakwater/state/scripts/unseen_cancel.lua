-- Counts a request to cancel a job of which nothing is known, by the user that gave it; each job once.
-- KEYS: the user's
-- Returns 1, or 0 where there are too many.
local job, most, keep_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - keep_ms)
if redis.call('ZSCORE', KEYS[1], job) == false and redis.call('ZCARD', KEYS[1]) >= most then
  return 0
end
redis.call('ZADD', KEYS[1], now, job)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1
