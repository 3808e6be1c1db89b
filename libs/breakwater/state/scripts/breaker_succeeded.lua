-- Notes that a call has succeeded, by its event: failures that were published before it are not in a row with later ones.
-- And who called, while fewer than two are known: the service that reads the events keeps them up to date.
-- KEYS: breaker
-- Returns 1, or 0 where that changes nothing.
local version, sequence = ARGV[1], tonumber(ARGV[2]) -- version: that let the call pass
local caller, keep_ms = ARGV[3], ARGV[4]
local known = redis.call('HMGET', KEYS[1], 'failures', 'last_success', 'state', 'version', 'callers')
if (known[3] or 'closed') ~= 'closed' or (known[4] or '0') ~= version then
  return 0
end
local changed, callers = 0, known[5] or ''
for name, kind in string.gmatch(caller, '((%a)%w*)') do
  local _, heard = string.gsub(' ' .. callers, ' ' .. kind, '')
  if heard < 2 and not string.find(' ' .. callers, ' ' .. name .. '=', 1, true) then
    callers = callers .. (callers == '' and '' or ' ') .. name .. '=' .. redis.call('TIME')[1] .. '000'
    redis.call('HSET', KEYS[1], 'callers', callers)
    changed = 1
  end
end
if known[1] and known[1] ~= '[]' and sequence > tonumber(known[2]) then
  redis.call('HSET', KEYS[1], 'last_success', ARGV[2])
  changed = 1
end
if changed == 1 then
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  if not known[3] then
    redis.call('PEXPIRE', KEYS[1], keep_ms)
  end
end
return changed
