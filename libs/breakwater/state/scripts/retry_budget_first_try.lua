-- Counts a first try in the slice of time that is now: field 'f<slice>'.
-- KEYS: counts
local slice_ms, slices, count = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] -- count -1 takes one back
local time = redis.call('TIME')
local slice = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / slice_ms)
if redis.call('HINCRBY', KEYS[1], 'f' .. slice, count) == tonumber(count) then
  -- Once in a slice: old slices are dropped, and this one is kept until it is over.
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local age = slice - tonumber(string.sub(field, 2))
    if age > slices or age < 0 then
      redis.call('HDEL', KEYS[1], field)
    end
  end
  redis.call('PEXPIRE', KEYS[1], slice_ms * (slices + 1))
end
return 1
