-- The scripts of deployments. Counts are one hash for each slice of time, '<counts>:<slice>', which expires by itself.
-- A hold is a hash. `until_ms` is its end for all. From `probe_at_ms` on, a call of another caller may be made all the same,
-- one at a time: the attempt `probe`, whose lease ends at `probe_until_ms`. `limited:<caller>` is the end for one
-- whose call had the rate limit, whatever the probes of others find. Until `spared_until_ms`, calls go elsewhere if they can.
local function count_first_try(key, slice_ms, slices, count)
  local counts = key .. ':' .. math.floor(now_ms() / slice_ms)
  if redis.call('HINCRBY', counts, 'first_tries', count) == tonumber(count) then
    redis.call('PEXPIRE', counts, slice_ms * (slices + 1))
  end
end
local function return_probe(hold, attempt_id)
  if redis.call('HGET', hold, 'probe') ~= attempt_id then
    return false
  end
  redis.call('HDEL', hold, 'probe', 'probe_until_ms')
  return true
end

--- admit
-- Counts a first try in the slice of now, unless the deployment is held. A call that a hold lets through is its probe.
-- KEYS: hold, and counts where a first try is to be counted
-- Returns the ms after which a call may ask again, and then nothing is counted; 0 where there is no hold; -1 for a probe.
local slice_ms, slices, caller, attempt_id = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local lease_ms = tonumber(ARGV[5]) -- '': only looks, and takes no probe
local spares = ARGV[6] == '1' -- the call can go elsewhere
local ASK_AGAIN_MS = 1000 -- while a probe is under way, whose end is unknown
local known = redis.call('HMGET', KEYS[1], 'until_ms', 'probe_at_ms', 'probe', 'probe_until_ms', 'limited:' .. caller, 'spared_until_ms')
local answer = 0
if known[1] or known[5] or known[6] then
  local now, until_ms = now_ms(), tonumber(known[1] or '0')
  local refused_until = math.max(tonumber(known[5] or '0'), spares and tonumber(known[6] or '0') or 0)
  if refused_until > now then
    return refused_until - now
  end
  if until_ms > now then
    local probe_at, lease_ends = tonumber(known[2]), tonumber(known[4] or '0')
    if probe_at > now then
      return math.min(probe_at, until_ms) - now
    end
    if known[3] and known[3] ~= attempt_id and lease_ends > now then
      return math.min(ASK_AGAIN_MS, lease_ends - now, until_ms - now)
    end
    answer = -1
    if lease_ms then
      redis.call('HSET', KEYS[1], 'probe', attempt_id, 'probe_until_ms', now + lease_ms)
    end
  end
end
if KEYS[2] then
  count_first_try(KEYS[2], slice_ms, slices, '1')
end
return answer

--- take_back
-- Takes back what was admitted, as the call was not made: a first try, where its counts are given, and a probe.
-- KEYS: hold, counts
local slice_ms, slices, attempt_id = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
return_probe(KEYS[1], attempt_id)
if KEYS[2] then
  count_first_try(KEYS[2], slice_ms, slices, '-1')
end
return 1

--- settle
-- Ends a probe; if it succeeded, also the hold, but for those whom the provider limits. Then has the calls that can go
-- elsewhere do so for a time, as the key was refused, or the provider's limits are used up.
-- KEYS: hold
local attempt_id, succeeded, spare_ms = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])
if return_probe(KEYS[1], attempt_id) and succeeded then
  redis.call('HDEL', KEYS[1], 'until_ms', 'probe_at_ms')
end
if spare_ms > 0 then
  redis.call('HSET', KEYS[1], 'spared_until_ms', now_ms() + spare_ms)
  keep(KEYS[1], spare_ms)
end
return 1

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
local slice, key = math.floor(now_ms() / slice_ms), string.match(caller, '^%S*')
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
-- Holds a deployment for so long from now on, unless it is held for longer already. Other callers probe a long hold: the
-- first of them immediately, and each later one when the wait that the one before was asked for is over, at most `long_ms`.
-- KEYS: hold
local hold_ms, long_ms, caller, attempt_id = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local now = now_ms()
local limited = 'limited:' .. caller
local known = redis.call('HMGET', KEYS[1], 'until_ms', 'probe_at_ms', limited)
local was_held, was_limited = tonumber(known[1] or '0') > now, tonumber(known[3] or '0') > now
local until_ms, probe_at = now + hold_ms, now + math.min(hold_ms, long_ms)
return_probe(KEYS[1], attempt_id)
if was_held and was_limited then
  probe_at = tonumber(known[2])
elseif was_held then
  probe_at = math.max(tonumber(known[2]), probe_at)
elseif hold_ms > long_ms then
  probe_at = now
end
if was_held or not was_limited then -- else another caller's probe has ended the hold since
  redis.call('HSET', KEYS[1], 'until_ms', math.max(until_ms, tonumber(known[1] or '0')), 'probe_at_ms', probe_at)
end
if hold_ms > long_ms then
  redis.call('HSET', KEYS[1], limited, math.max(until_ms, tonumber(known[3] or '0')))
  local fields = redis.call('HGETALL', KEYS[1])
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 8) == 'limited:' and tonumber(fields[i + 1]) <= now then
      redis.call('HDEL', KEYS[1], fields[i])
    end
  end
end
keep(KEYS[1], hold_ms)
return 1

--- held
-- Reads the end of a hold.
-- KEYS: hold
-- Returns the ms until it ends; 0 where there is none.
return math.max(0, tonumber(redis.call('HGET', KEYS[1], 'until_ms') or '0') - now_ms())
