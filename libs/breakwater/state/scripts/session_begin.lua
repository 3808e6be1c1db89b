-- Adds a session to its holder's, ends the oldest where there would be too many, and forgets those that are over.
-- KEYS[1] the holder's sessions: began_ms, ends_ms and the session itself, by id
-- ARGV[1] id  ARGV[2] session  ARGV[3] how long it lasts, in ms  ARGV[4] the most of one holder
-- Returns when it ends, in ms.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = now + tonumber(ARGV[3])
local living = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local began, until_ms = string.match(all[i + 1], '^(%d+) (%d+) ')
  if tonumber(until_ms) <= now then
    redis.call('HDEL', KEYS[1], all[i])
  else
    living[#living + 1] = { tonumber(began), all[i] }
  end
end
table.sort(living, function(a, b) return a[1] < b[1] end)
for i = 1, #living - tonumber(ARGV[4]) + 1 do
  redis.call('HDEL', KEYS[1], living[i][2])
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %d %s', now, ends, ARGV[2]))
redis.call('PEXPIREAT', KEYS[1], ends)
return ends
