-- The scripts of documents. KEYS[1] is one: a hash of its text, and the number of its changes.

--- load
return redis.call('HMGET', KEYS[1], 'text', 'revision')

--- save
-- Saves a document, unless it was changed since it was read.
-- Returns 1, or 0 where it was.
local revision, text, keep_ms = ARGV[1], ARGV[2], ARGV[3]
if (redis.call('HGET', KEYS[1], 'revision') or '0') ~= revision then
  return 0
end
redis.call('HSET', KEYS[1], 'text', text, 'revision', revision + 1)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1

--- forget
-- Its revision goes on, or a document that was read before could be saved over a later one.
redis.call('HDEL', KEYS[1], 'text')
redis.call('HINCRBY', KEYS[1], 'revision', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
