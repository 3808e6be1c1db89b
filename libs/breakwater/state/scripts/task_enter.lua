-- A job of a task asks to call: its iteration is counted, once however often it asks, and never while the task is
-- tripped; and what the call may bring the job to is held, if the cost cap has room for it.
-- KEYS: task, marker of the execution
-- ARGV: keep_ms, marker's keep_ms, execution, hold asked for, cost cap ('' = none), fields to read...
-- Returns {number of the iteration (0 while tripped), held for other jobs, over the cap (1 or 0), the fields}.
-- A marker is '<life>:<number>:<in or done>'. A task that was reset or forgotten begins a new life, in which the jobs of
-- the one before count for nothing: their number is 0, and they hold nothing.
-- The hold of a job is the field 'h:<execution>', none where it is 0; 'held_cost' is the sum of all.
local hold = 'h:' .. ARGV[3]
local known = redis.call('HMGET', KEYS[1], 'rule', 'life', 'cost', 'held_cost', hold)
local mine = known[5]
local others = tonumber(known[4] or '0') - tonumber(mine or '0')
local over = ARGV[5] ~= '' and tonumber(known[3] or '0') + others + tonumber(ARGV[4]) > tonumber(ARGV[5])
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
    life, state = known[2], 'in'
    if not life then
      local time = redis.call('TIME')
      life = time[1] .. '.' .. time[2]
      redis.call('HSET', KEYS[1], 'life', life)
      redis.call('PEXPIRE', KEYS[1], ARGV[1])
    end
    number = redis.call('HINCRBY', KEYS[1], 'iterations', 1)
    redis.call('SET', KEYS[2], life .. ':' .. number .. ':in', 'PX', ARGV[2])
  end
  if number > 0 and state == 'in' and not over then
    if mine then
      redis.call('HINCRBY', KEYS[1], 'held_cost', '-' .. mine)
      redis.call('HDEL', KEYS[1], hold)
    end
    if ARGV[4] ~= '0' then
      redis.call('HINCRBY', KEYS[1], 'held_cost', ARGV[4])
      redis.call('HSET', KEYS[1], hold, ARGV[4])
    end
  end
end
return {number, others, over and 1 or 0, redis.call('HMGET', KEYS[1], unpack(ARGV, 6))}
