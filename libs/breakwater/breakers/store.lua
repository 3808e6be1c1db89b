-- The scripts of breakers. KEYS[1] is the breaker, but where a script says otherwise.

--- admit
-- Admits a call. Closed: yes. Isolated: no. Open: no, until the cool-down is over. Half-open: one leased probe in the fleet.
-- A breaker that refuses only another caller lets the call pass. So does one that the call's own task has opened, if the task has
-- a breaker of its own. After another's failed probe one more may be made before the cool-down is over.
-- Returns {verdict, until_ms, version, changed, wait_ms, why}: verdict is 'closed', 'probe', 'refused', or 'probing' (refused,
-- as another attempt holds the probe). `why` comes with a refusal: the reason and the figures it opened for.
local breaker, attempt_id = KEYS[1], ARGV[1]
local probe_lease_ms = tonumber(ARGV[2]) -- '': only looks, and takes no probe
local caller, task = ARGV[3], ARGV[4] -- '': unknown, or a task without a breaker of its own
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
local now = now_ms()
local whose = redis.call('HMGET', breaker, 'alone', 'probed_by', 'task')
local function is_of_another(one)
  for name in string.gmatch(caller ~= '' and one or '', '%S+') do -- a key, a tenant, or both
    if not string.find(' ' .. caller .. ' ', ' ' .. name .. ' ', 1, true) then
      return true
    end
  end
  return false
end
if is_of_another(whose[1]) or (task ~= '' and whose[3] == task) then
  return {'closed', 0, version, 0, 0}
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
  if (whose[1] or '') == '' then
    redis.call('HSET', breaker, 'counts_from', version)
  end
elseif known[3] == attempt_id then
  changed = 1 -- asked again, as the first answer was lost: the caller has yet to publish the change
end
local lease_until = now + probe_lease_ms
redis.call('HSET', breaker, 'state', 'half_open', 'probe', attempt_id, 'probe_until_ms', lease_until, 'version', version)
redis.call('HINCRBY', breaker, 'revision', 1)
return {'probe', lease_until, version, changed, 0}

--- return_probe
-- Releases the half-open probe, if this attempt holds it: it never made its call.
-- Returns 1, or 0 where another attempt holds it, or none.
local attempt_id = ARGV[1]
if redis.call('HGET', KEYS[1], 'probe') == attempt_id then
  redis.call('HSET', KEYS[1], 'probe', '', 'probe_until_ms', 0)
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  return 1
end
return 0

--- load
-- Reads a breaker. KEYS: breaker, filling
-- Returns {now in ms, the mark of the filling, its fields and values in turn}.
local now = now_ms()
return {now, redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1])}

--- save
-- Saves a breaker, unless it was changed or Redis was emptied since it was read. KEYS: breaker, filling
-- Returns 1, or 0 where it was.
local revision_read, filling_read, keep_ms = ARGV[1], ARGV[2], ARGV[3] -- keep_ms 0: it does not expire
local fields_and_values = {unpack(ARGV, 4)}
if (redis.call('HGET', KEYS[1], 'revision') or '0') ~= revision_read
  or (redis.call('GET', KEYS[2]) or '') ~= filling_read then
  return 0
end
redis.call('HSET', KEYS[1], unpack(fields_and_values))
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if keep_ms == '0' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], keep_ms)
end
return 1

--- published
-- Records that transitions have been published, unless newer ones have taken their place.
-- Returns 1, or 0 where newer ones have.
local transitions = ARGV[1]
if redis.call('HGET', KEYS[1], 'unpublished') == transitions then
  redis.call('HSET', KEYS[1], 'unpublished', '')
  return 1
end
return 0

--- succeeded
-- Notes that a call has succeeded, by its event: failures that were published before it are not in a row with later ones.
-- And its caller, while fewer than two are known: the service that reads the events keeps them up to date.
-- Returns 1, or 0 where that changes nothing.
local version, sequence = tonumber(ARGV[1]), tonumber(ARGV[2]) -- version: that let the call pass
local caller, keep_ms = ARGV[3], ARGV[4]
local FIELDS = {'failures', 'last_success', 'state', 'version', 'callers', 'alone', 'counts_from', 'successes'}
local known = redis.call('HMGET', KEYS[1], unpack(FIELDS))
local state, alone, concerns = known[3] or 'closed', known[6] or '', true
for name in string.gmatch(caller ~= '' and alone or '', '%S+') do
  concerns = concerns and string.find(' ' .. caller .. ' ', ' ' .. name .. ' ', 1, true)
end
if state == 'isolated' or (state ~= 'closed' and concerns) or tonumber(known[4] or '0') < version
  or tonumber(known[7] or known[4] or '0') > version then
  return 0
end
local changed, callers = 0, known[5] or ''
for name, kind in string.gmatch(caller, '((%a)%w*)') do
  if not string.find(' ' .. callers, ' ' .. name .. '=', 1, true)
    and select(2, string.gsub(' ' .. callers, ' ' .. kind, '')) < 2 then
    callers = callers .. (callers == '' and '' or ' ') .. name .. '=' .. redis.call('TIME')[1] .. '000'
    redis.call('HSET', KEYS[1], 'callers', callers)
    changed = 1
  end
end
if known[1] and known[1] ~= '[]' then
  local successes = known[8] or ''
  for name in string.gmatch(caller, '%S+') do
    local before = tonumber(string.match(' ' .. successes, ' ' .. name .. '=(%d+)') or '0')
    if sequence > before and string.find(known[1], name, 1, true) then
      successes = string.gsub(' ' .. successes, ' ' .. name .. '=%d+', '') .. ' ' .. name .. '=' .. ARGV[2]
      redis.call('HSET', KEYS[1], 'successes', successes)
      changed = 1
    end
  end
  if sequence > tonumber(known[2]) then
    redis.call('HSET', KEYS[1], 'last_success', ARGV[2])
    changed = 1
  end
end
if changed == 1 then
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  if not known[3] then
    redis.call('PEXPIRE', KEYS[1], keep_ms)
  end
end
return changed

--- log
-- Returns nothing where the breakers may lack what they knew before Redis had its data.
-- KEYS: filled, since when Redis had its data then, and since when it has them
local since = redis.call('GET', KEYS[2])
return (not since or since == redis.call('GET', KEYS[3])) and redis.call('GET', KEYS[1])

--- begin_filling
-- KEYS: filling, filled, the same two times
local since = kept_since(KEYS[4])
if redis.call('GET', KEYS[3]) ~= since then
  redis.call('DEL', KEYS[2])
  redis.call('SET', KEYS[3], since)
end
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])

--- mark_filled
-- KEYS: filled, filling, the same two times
if redis.call('GET', KEYS[2]) ~= ARGV[2] or redis.call('GET', KEYS[3]) ~= redis.call('GET', KEYS[4]) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1])
return 1

--- list
-- KEYS: index of all breakers
return redis.call('SADD', KEYS[1], unpack(ARGV))
