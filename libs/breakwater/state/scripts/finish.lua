-- Ends the claim of a job whose record is published, if it is still ours. It lingers, taken: a message of the same job that
-- was on its way meanwhile must find somebody, and then the record. A job that was taken over is kept, with its token: its
-- first holder may come back at any time, and must not take what it does not find for what Redis has lost.
-- KEYS: execution; orders to cancel it, and the jobs that wait for it
-- Returns 0 where the claim is not ours; else 1, or the values of the second key where there are any, after a '' where it has
-- children that belong to its task.
local token, linger_ms = ARGV[1], tonumber(ARGV[2])
local known = redis.call('HMGET', KEYS[1], 'token', 'taken_over', 'children')
if known[1] ~= token then
  return 0
end
local notices = redis.call('HVALS', KEYS[2])
if #notices > 0 then
  redis.call('DEL', KEYS[2])
end
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'checkpoint', 'asked_at', 'said', 'messages')
redis.call('HSET', KEYS[1], 'lease_until', time[1] * 1000 + math.floor(time[2] / 1000) + linger_ms)
if not known[2] then
  redis.call('PEXPIRE', KEYS[1], linger_ms)
end
if known[3] then
  table.insert(notices, 1, '')
end
return #notices > 0 and notices or 1
