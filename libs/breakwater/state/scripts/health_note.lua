-- Takes an agent's calls into account: how many failed since the latest success, and when each kind ended last.
-- The figures of a model include the event log up to a sequence: an event that comes again changes nothing.
-- KEYS: health of the agent
-- ARGV from the 2nd, for each model ('' for all together): model, n, and n times: sequence, at_ms, failed (0 or 1)
local keep_ms, i = ARGV[1], 2
while i <= #ARGV do
  local model, n = ARGV[i], tonumber(ARGV[i + 1])
  local known = redis.call('HMGET', KEYS[1], 'through:' .. model, 'in_a_row:' .. model)
  local through, in_a_row = tonumber(known[1] or '0'), tonumber(known[2] or '0')
  local changed = {}
  for k = i + 2, i + 2 + 3 * (n - 1), 3 do
    local sequence, at_ms, failed = tonumber(ARGV[k]), ARGV[k + 1], ARGV[k + 2]
    if sequence > through then
      through = sequence
      if failed == '1' then
        in_a_row = in_a_row + 1
        changed['failure:' .. model] = at_ms
      else
        in_a_row = 0
        changed['success:' .. model] = at_ms
      end
    end
  end
  if next(changed) then
    for field, value in pairs(changed) do
      redis.call('HSET', KEYS[1], field, value)
    end
    redis.call('HSET', KEYS[1], 'through:' .. model, through, 'in_a_row:' .. model, in_a_row)
  end
  i = i + 2 + 3 * n
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1
