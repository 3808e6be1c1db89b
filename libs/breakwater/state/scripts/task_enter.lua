-- A job of a task asks to call: its iteration is counted, once however often it asks, and never while the task is tripped.
-- KEYS: task, marker of the execution   ARGV: keep_ms, marker's keep_ms, fields to read...
-- Returns {number of the iteration (0 while tripped), the fields}.
-- A marker is '<life>:<number>:<in or done>'. A task that was reset or forgotten begins a new life, in which the jobs of
-- the one before count for nothing: their number is 0.
local known = redis.call('HMGET', KEYS[1], 'rule', 'life')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
local number = 0
if not known[1] then
  local life, counted, state = string.match(redis.call('GET', KEYS[2]) or '', '^([^:]+):(%d+):(%a+)$')
  if life and life == known[2] then
    number = tonumber(counted)
    if state == 'in' then
      redis.call('PEXPIRE', KEYS[2], ARGV[2])
    end
  elseif not life then
    life = known[2]
    if not life then
      local time = redis.call('TIME')
      life = time[1] .. '.' .. time[2]
      redis.call('HSET', KEYS[1], 'life', life)
      redis.call('PEXPIRE', KEYS[1], ARGV[1])
    end
    number = redis.call('HINCRBY', KEYS[1], 'iterations', 1)
    redis.call('SET', KEYS[2], life .. ':' .. number .. ':in', 'PX', ARGV[2])
  end
end
return {number, redis.call('HMGET', KEYS[1], unpack(ARGV, 3))}
