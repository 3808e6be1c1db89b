-- A call has ended: it is under way no more, and counts with the tokens it used. Again, it sets the same figures.
-- KEYS: attempt, then for each limit: counts, calls   ARGV: attempt_id, tokens ('' = unknown: the worst case stays)
for k = 2, #KEYS, 2 do
  redis.call('ZREM', KEYS[k + 1], ARGV[1])
  local slice, tokens = string.match(redis.call('HGET', KEYS[1], KEYS[k]) or '', '^(%d+)|(%d+)$')
  -- A slice that is over has left the sums, or will with what it holds.
  if slice and ARGV[2] ~= '' and redis.call('HEXISTS', KEYS[k], 't' .. slice) == 1 then
    local more = tonumber(ARGV[2]) - tonumber(tokens)
    redis.call('HINCRBY', KEYS[k], 't' .. slice, more)
    redis.call('HINCRBY', KEYS[k], 'tokens', more)
    redis.call('HSET', KEYS[1], KEYS[k], slice .. '|' .. ARGV[2])
  end
end
return 1
