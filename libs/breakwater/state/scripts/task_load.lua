-- Reads a task.
-- KEYS: task   ARGV: fields to read
return redis.call('HMGET', KEYS[1], unpack(ARGV))
