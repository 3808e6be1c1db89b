-- May this retry be made? If retries < max(floor, ratio * first tries) within the window; then it counts: field 'r<slice>'.
-- Asking again for the same attempt gives the same answer. Those of each caller are counted, too: field
-- 'o<slice>:<caller>'. One that has made less than half of what may be made is granted some also where others have used
-- up all: a key until half as much again is made, a tenant of a key that has made more until a quarter is, as that key may
-- have made it up.
-- KEYS: counts, answer
-- Retries count for one slice more than first tries do: both round against the retry.
local slice_ms, slices, floor, ratio_millionths = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local remember_ms, caller = ARGV[5], ARGV[6] -- caller: '' where it is not known
local answered = redis.call('GET', KEYS[2])
if answered then
  return tonumber(answered)
end
local time = redis.call('TIME')
local slice = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / slice_ms)
local key = string.match(caller, '^%S*')
local sums, own, of_key = {f = 0, r = 0}, 0, 0
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  local kind, age = string.sub(known[i], 1, 1), slice - tonumber(string.match(known[i], '%d+'))
  if age > slices or age < 0 then
    redis.call('HDEL', KEYS[1], known[i])
  elseif kind == 'o' then
    local whose, count = string.match(known[i], ':(.*)'), tonumber(known[i + 1])
    own = own + (whose == caller and count or 0)
    of_key = of_key + (string.match(whose, '^%S*') == key and count or 0)
  elseif kind == 'r' or age < slices then
    sums[kind] = sums[kind] + tonumber(known[i + 1])
  end
end
local granted = 0
local made, most = sums.r * 1000000, math.max(floor * 1000000, ratio_millionths * sums.f)
local reserve = (of_key * 2000000 < most and 0.5) or (own * 2000000 < most and 0.25) or 0
if made < most or (caller ~= '' and made < most * (1 + reserve)) then
  granted = 1
  if caller ~= '' then
    redis.call('HINCRBY', KEYS[1], 'o' .. slice .. ':' .. caller, 1)
  end
  redis.call('HINCRBY', KEYS[1], 'r' .. slice, 1)
  redis.call('PEXPIRE', KEYS[1], slice_ms * (slices + 1))
end
redis.call('SET', KEYS[2], granted, 'PX', remember_ms)
return granted
