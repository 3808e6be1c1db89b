-- Appends to the part of a job's answer that is out, if the claim is still ours: whoever takes the job over goes on there.
-- KEYS: execution
-- Returns 1, or 0 where it is not.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] and redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], 'partial', (redis.call('HGET', KEYS[1], 'partial') or '') .. ARGV[2], 'messages', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
