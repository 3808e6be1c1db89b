-- Ends the claim of a worker that is dead, if the job is still its own. As one that was taken over, so that nothing that
-- comes of this worker after all is taken for what Redis has lost.
-- KEYS: execution
-- Returns 1 where nobody has the job now, 0 where somebody else has.
local token, worker = redis.call('HGET', KEYS[1], 'token'), ARGV[1]
if not token then
  return 1
end
if string.sub(token, 1, #worker) ~= worker then
  return 0
end
redis.call('HDEL', KEYS[1], 'token', 'lease_until', 'asked_at')
redis.call('HSET', KEYS[1], 'taken_over', 1)
return 1
