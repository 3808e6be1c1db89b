-- The answer to a question, or who is to get it: one leader at a time, until its lease ends. The same holder leads on.
-- KEYS: answer, flight   ARGV: holder, lease_ms
-- Returns {'answer', text}, {'leader', 0} or {'follower', ms until the leader's lease ends}.
local answer = redis.call('GET', KEYS[1])
if answer then
  return {'answer', answer}
end
local leader = redis.call('GET', KEYS[2])
if leader and leader ~= ARGV[1] then
  return {'follower', redis.call('PTTL', KEYS[2])}
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {'leader', 0}
