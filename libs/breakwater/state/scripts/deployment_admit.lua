-- May a call be made? Not while the deployment is held. Then a first try is counted in the slice of time that is now:
-- field 'f<slice>'.
-- KEYS: hold, and counts where a first try is to be counted
-- Returns the ms until the hold ends, and then nothing is counted; 0 where there is none.
local slice_ms, slices, count = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] -- count -1 takes one back, held or not
local held_ms = count == '-1' and 0 or redis.call('PTTL', KEYS[1])
if held_ms > 0 then
  return held_ms
end
if not KEYS[2] then
  return 0
end
local time = redis.call('TIME')
local slice = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / slice_ms)
if redis.call('HINCRBY', KEYS[2], 'f' .. slice, count) == tonumber(count) then
  -- Once in a slice: old slices are dropped, and this one is kept until it is over.
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    local age = slice - tonumber(string.match(field, '%d+'))
    if age > slices or age < 0 then
      redis.call('HDEL', KEYS[2], field)
    end
  end
  redis.call('PEXPIRE', KEYS[2], slice_ms * (slices + 1))
end
return 0
