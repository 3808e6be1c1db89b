-- Takes the heartbeat of a worker, and names the others whose last one is older than it should be.
-- KEYS: workers: by id, the time of the last heartbeat in ms, and the NATS server that the worker was heard on
-- Returns how many are not late, this one included, and {{id, ms since its last heartbeat, server}…}
local worker, server, late_ms, forget_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, late, running = redis.call('HGETALL', KEYS[1]), {}, 1
for i = 1, #known, 2 do
  local at, heard_on = string.match(known[i + 1], '^(%d+) (.*)$')
  local silent_ms = now - at
  if silent_ms > forget_ms then
    redis.call('HDEL', KEYS[1], known[i])
  elseif known[i] == worker then
    -- Counted already.
  elseif silent_ms > late_ms then
    late[#late + 1] = {known[i], silent_ms, heard_on}
  else
    running = running + 1
  end
end
redis.call('HSET', KEYS[1], worker, string.format('%d %s', now, server))
return {running, late}
