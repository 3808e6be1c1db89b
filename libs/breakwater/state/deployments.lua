-- The scripts of deployments. Counts are one hash for each slice of time, '<counts>:<slice>', which expires by itself.
local function slice_of_now(slice_ms)
  local time = redis.call('TIME')
  return math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / slice_ms)
end

--- admit
-- Counts a first try in the slice of now, unless the deployment is held.
-- KEYS: hold, and counts where a first try is to be counted
-- Returns the ms until the hold ends, and then nothing is counted; 0 where there is none.
local slice_ms, slices, count = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] -- count -1 takes one back, held or not
local held_ms = count == '-1' and 0 or redis.call('PTTL', KEYS[1])
if held_ms > 0 then
  return held_ms
end
if KEYS[2] then
  local counts = KEYS[2] .. ':' .. slice_of_now(slice_ms)
  if redis.call('HINCRBY', counts, 'first_tries', count) == tonumber(count) then
    redis.call('PEXPIRE', counts, slice_ms * (slices + 1))
  end
end
return 0

--- ask_retry
-- Grants a retry if retries < max(floor, ratio * first tries) within the window, and counts it. Asking again for the same
-- attempt gives the same answer. Those of each caller are counted, too. One that has made less than half of the permitted
-- number is granted some also where others have used up all: a key until half as much again is made, a tenant of a key that
-- has made more until a quarter is, as that key may have made it up.
-- KEYS: counts, answer
-- Retries count for one slice more than first tries do: both round against the retry.
local slice_ms, slices, floor, ratio_millionths = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local remember_ms, caller = ARGV[5], ARGV[6] -- caller: '<key> <tenant>', or '' where it is not known
local answered = redis.call('GET', KEYS[2])
if answered then
  return tonumber(answered)
end
local slice, key = slice_of_now(slice_ms), string.match(caller, '^%S*')
local first_tries, made, own, of_key = 0, 0, 0, 0
for age = 0, slices do
  local counts = redis.call('HMGET', KEYS[1] .. ':' .. slice - age, 'first_tries', 'retries', 'of:' .. caller, 'of key:' .. key)
  first_tries = first_tries + (age < slices and tonumber(counts[1]) or 0)
  made = made + (tonumber(counts[2]) or 0)
  own = own + (tonumber(counts[3]) or 0)
  of_key = of_key + (tonumber(counts[4]) or 0)
end
local granted = 0
local most = math.max(floor, ratio_millionths * first_tries / 1000000)
local reserve = (of_key * 2 < most and 0.5) or (own * 2 < most and 0.25) or 0
if made < most or (caller ~= '' and made < most * (1 + reserve)) then
  granted = 1
  local counts = KEYS[1] .. ':' .. slice
  redis.call('HINCRBY', counts, 'retries', 1)
  if caller ~= '' then
    redis.call('HINCRBY', counts, 'of:' .. caller, 1)
    redis.call('HINCRBY', counts, 'of key:' .. key, 1)
  end
  redis.call('PEXPIRE', counts, slice_ms * (slices + 1))
end
redis.call('SET', KEYS[2], granted, 'PX', remember_ms)
return granted

--- hold
-- Holds a deployment for so long from now on, unless it is held for longer already. The hold is the key's expiry.
-- KEYS: hold
local hold_ms = tonumber(ARGV[1])
if redis.call('PTTL', KEYS[1]) < hold_ms then
  redis.call('SET', KEYS[1], '', 'PX', hold_ms)
end
return 1
