-- Ends the claim of a worker that is dead, if the job is still its own. As one that was taken over, so that nothing that
-- comes of this worker after all is taken for what Redis has lost.
-- KEYS: execution
-- Returns 'freed'; 'unclaimed' where nobody has the job, or Redis has lost who; 'held' where somebody else has it.
local token, worker = redis.call('HGET', KEYS[1], 'token'), ARGV[1]
if not token then
  return 'unclaimed'
end
if string.sub(token, 1, #worker) ~= worker then
  return 'held'
end
redis.call('HDEL', KEYS[1], 'token', 'lease_until', 'asked_at')
redis.call('HSET', KEYS[1], 'taken_over', 1)
return 'freed'
