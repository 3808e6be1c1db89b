-- What counts towards a limit now. Reads only: the sums may hold slices that are over.
-- KEYS: counts, calls
-- Returns {requests, tokens, calls under way}.
local slice_ms, slices = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first = math.floor(now / slice_ms) - slices
local sums = {r = 0, t = 0}
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  local kind, slice = string.match(known[i], '^([rt])(%d+)$')
  if kind and tonumber(slice) >= first then
    sums[kind] = sums[kind] + tonumber(known[i + 1])
  end
end
return {sums.r, sums.t, redis.call('ZCOUNT', KEYS[2], '(' .. now, '+inf')}
