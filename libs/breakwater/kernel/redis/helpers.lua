-- What the scripts of all stores can call.
-- The time by the server's clock, in ms since the epoch.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- Keeps a key for at least so long.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms)
  end
end
-- Since when Redis has its data, in ms.
local function kept_since(key)
  redis.call('SET', key, now_ms(), 'NX')
  return redis.call('GET', key)
end
