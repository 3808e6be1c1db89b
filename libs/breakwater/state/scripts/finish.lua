-- Ends the claim of a job whose record is published, if it is still ours; without a token, whosever it is. It lingers, taken: a
-- message of the same job that was on its way meanwhile must find somebody, and then the record. A job that was taken over is
-- kept, with its token: its first holder may come back at any time, and must not take what it does not find for what Redis has
-- lost.
-- KEYS: execution; cancel requests for it, the jobs that wait for it, and '' where it has children that belong to its task
-- Returns 0 where the claim is not ours; else 1, or where the job has a task or any values in the second key: {its tenant or
-- '', its task or '', the values}. The task of one that has children is its own id, also to who asks again.
local token, linger_ms, own_task = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local known = redis.call('HMGET', KEYS[1], 'token', 'taken_over', 'tenant', 'task')
if token ~= '' and known[1] ~= token then
  return 0
end
local notices, task = redis.call('HVALS', KEYS[2]), known[4]
if #notices > 0 then
  task = task or (redis.call('HEXISTS', KEYS[2], 'children') == 1 and own_task)
  redis.call('DEL', KEYS[2])
end
local ended = (task or #notices > 0) and {known[3] or '', task or '', unpack(notices)} or 1
if token == '' and redis.call('EXISTS', KEYS[1]) == 0 then
  return ended
end
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'checkpoint', 'asked_at', 'partial', 'messages')
redis.call('HSET', KEYS[1], 'lease_until', time[1] * 1000 + math.floor(time[2] / 1000) + linger_ms)
if not known[2] then
  redis.call('PEXPIRE', KEYS[1], linger_ms)
end
if task and not known[4] then
  redis.call('HSET', KEYS[1], 'task', task)
end
return ended
