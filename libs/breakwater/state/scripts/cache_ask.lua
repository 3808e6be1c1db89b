-- A cached answer, or who is to make the call: one leader at a time, until its lease ends. The same holder asks again and
-- is still the leader.
-- KEYS: answer, flight
-- Returns {'answer', text}, {'leader', 0} or {'follower', ms until the leader's lease ends}.
local holder, lease_ms = ARGV[1], ARGV[2]
local answer = redis.call('GET', KEYS[1])
if answer then
  return {'answer', answer}
end
local leader = redis.call('GET', KEYS[2])
if leader and leader ~= holder then
  return {'follower', redis.call('PTTL', KEYS[2])}
end
redis.call('SET', KEYS[2], holder, 'PX', lease_ms)
return {'leader', 0}
