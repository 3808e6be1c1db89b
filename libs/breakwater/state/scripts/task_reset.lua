-- Forgets a task, and answers with what it was. That is kept aside for a moment, for whoever asks again as the answer
-- was lost.
-- KEYS: task, aside   ARGV: aside's keep_ms, fields to read...
-- Returns the fields.
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return redis.call('HMGET', KEYS[2], unpack(ARGV, 2))
