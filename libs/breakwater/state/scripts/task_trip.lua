-- Stops a task, unless it is stopped already: the first trip stands.
-- KEYS: task   ARGV from the 8th: fields to read
-- Returns the fields.
local keep_ms, rule, reason, agent, execution = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local at_ms, published, first_field = ARGV[6], ARGV[7], 8 -- at_ms '': now; published: 1 where its event is published already, else 0
if redis.call('HEXISTS', KEYS[1], 'rule') == 0 then
  if at_ms == '' then
    local time = redis.call('TIME')
    at_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  end
  redis.call('HSET', KEYS[1], 'rule', rule, 'reason', reason, 'agent', agent, 'execution', execution,
    'at_ms', at_ms, 'published', published)
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return redis.call('HMGET', KEYS[1], unpack(ARGV, first_field))
