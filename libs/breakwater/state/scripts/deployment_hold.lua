-- Holds a deployment for so long from now on, unless it is held for longer already. The hold is the key's expiry.
-- KEYS: hold
local hold_ms = tonumber(ARGV[1])
if redis.call('PTTL', KEYS[1]) < hold_ms then
  redis.call('SET', KEYS[1], '', 'PX', hold_ms)
end
return 1
