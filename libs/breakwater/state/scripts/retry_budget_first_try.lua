-- Counts a first try in the slice of time that is now: field 'f<slice>'.
-- KEYS: counts   ARGV: slice_ms, slices, how many (-1 takes one back)
local time = redis.call('TIME')
local slice = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / tonumber(ARGV[1]))
if redis.call('HINCRBY', KEYS[1], 'f' .. slice, ARGV[3]) == 1 then
  -- Once in a slice: what is over goes.
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local age = slice - tonumber(string.sub(field, 2))
    if age > tonumber(ARGV[2]) or age < 0 then
      redis.call('HDEL', KEYS[1], field)
    end
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1] * (ARGV[2] + 1))
return 1
