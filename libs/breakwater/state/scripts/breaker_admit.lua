-- May this attempt call? Closed: yes. Isolated: no. Open: no, until the cool-down is over. Half-open: one leased probe
-- in the fleet. What another caller has opened alone gives way; and whose probe failed has only another probe before the
-- cool-down is over.
-- KEYS: breaker
-- Returns {verdict, until_ms, version, changed, wait_ms, why}: verdict is 'closed', 'probe', 'refused', 'gives_way', or
-- 'probing' (refused, as another attempt holds the probe). `why` comes with a refusal: the reason and the figures it opened for.
local breaker, attempt_id = KEYS[1], ARGV[1]
local probe_lease_ms = tonumber(ARGV[2]) -- '': only looks, and takes no probe
local caller = ARGV[3] -- '': unknown
local function refused(verdict, until_ms, version, wait_ms)
  local why = redis.call('HMGET', breaker, 'reason', 'consecutive_failures', 'total_failures', 'errors_seen')
  return {verdict, until_ms, version, 0, wait_ms, why}
end
local known = redis.call('HMGET', breaker, 'state', 'open_until_ms', 'probe', 'probe_until_ms', 'version')
local state, version = known[1] or 'closed', tonumber(known[5] or '0')
if state == 'closed' then
  return {'closed', 0, version, 0, 0}
end
if state == 'isolated' then
  return refused('refused', 0, version, 0)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local whose = redis.call('HMGET', breaker, 'alone', 'probed_by')
local function is_of_another(one)
  for name in string.gmatch(caller ~= '' and one or '', '%S+') do -- a key, a tenant, or both
    if not string.find(' ' .. caller .. ' ', ' ' .. name .. ' ', 1, true) then
      return true
    end
  end
  return false
end
if is_of_another(whose[1]) then
  return refused('gives_way', now, version, 0)
end
local probed_by = ''
if state == 'open' then
  local open_until = tonumber(known[2])
  if now < open_until and is_of_another(whose[2]) then
    probed_by = whose[2]
  elseif now < open_until then
    return refused('refused', open_until, version, open_until - now)
  end
elseif known[3] and known[3] ~= '' and known[3] ~= attempt_id and now < tonumber(known[4]) then
  return refused('probing', tonumber(known[4]), version, tonumber(known[4]) - now)
end
if not probe_lease_ms then
  return {'probe', now, version, 0, 0}
end
local changed = 0
if state == 'open' then
  version = version + 1
  changed = 1
  redis.call('HSET', breaker, 'changed_ms', now, 'probed_by', probed_by)
elseif known[3] == attempt_id then
  changed = 1 -- asked again, as the first answer was lost: the caller has yet to publish the change
end
local lease_until = now + probe_lease_ms
redis.call('HSET', breaker, 'state', 'half_open', 'probe', attempt_id, 'probe_until_ms', lease_until, 'version', version)
redis.call('HINCRBY', breaker, 'revision', 1)
return {'probe', lease_until, version, changed, 0}
