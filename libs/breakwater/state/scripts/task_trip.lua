-- Stops a task, unless it is stopped already: the first trip stands.
-- KEYS: task   ARGV: keep_ms, rule, reason, agent, execution, at_ms ('' = now), told (1 or 0), fields to read...
-- Returns the fields.
if redis.call('HEXISTS', KEYS[1], 'rule') == 0 then
  local at = ARGV[6]
  if at == '' then
    local time = redis.call('TIME')
    at = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  end
  redis.call('HSET', KEYS[1], 'rule', ARGV[2], 'reason', ARGV[3], 'agent', ARGV[4], 'execution', ARGV[5],
    'at_ms', at, 'told', ARGV[7])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('HMGET', KEYS[1], unpack(ARGV, 8))
