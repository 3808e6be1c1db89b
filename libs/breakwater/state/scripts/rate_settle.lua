-- Settles a call that has ended: it is under way no more, and counts with the tokens it used. Again, it sets the same
-- figures.
-- KEYS: attempt, then for each limit: counts, calls
local attempt, attempt_id, used = KEYS[1], ARGV[1], ARGV[2] -- used '': unknown, the worst case stays
for k = 2, #KEYS, 2 do
  redis.call('ZREM', KEYS[k + 1], attempt_id)
  local slice, tokens = string.match(redis.call('HGET', attempt, KEYS[k]) or '', '^(%d+)|(%d+)$')
  -- A slice that is over has left the sums, or will with what it holds.
  if slice and used ~= '' and redis.call('HEXISTS', KEYS[k], 't' .. slice) == 1 then
    local more = tonumber(used) - tonumber(tokens)
    redis.call('HINCRBY', KEYS[k], 't' .. slice, more)
    redis.call('HINCRBY', KEYS[k], 'tokens', more)
    redis.call('HSET', attempt, KEYS[k], slice .. '|' .. used)
  end
end
return 1
