-- Admits a call of a job of a task: its iteration is counted, once however often it asks, and never while the task is
-- tripped; and what the job may have cost after the call is held, if the cost cap has room for it.
-- KEYS: task, marker of the execution   ARGV from the 7th: fields to read
-- Returns {number of the iteration (0 while tripped), held for other jobs, over the cap (1 or 0), the fields}.
-- A marker is '<life>:<number>:<in or done>'. A task that was reset or forgotten starts a new life, in which the jobs of
-- the one before count for nothing: their number is 0, and they hold nothing.
-- The hold of a job is the field 'h:<execution>', none where it is 0; 'held_cost' is the sum of all.
local keep_ms, marker_keep_ms = ARGV[1], ARGV[2] -- keep_ms '': only looks, as a job that has not entered yet
local execution, cost, cost_cap = ARGV[3], ARGV[4], ARGV[5] -- cost_cap '': none
local only_first = ARGV[6] == '1' -- what the job holds stays as it is where it has entered before
local task, marker, first_field = KEYS[1], KEYS[2], 7
local hold = 'h:' .. execution
local known = redis.call('HMGET', task, 'rule', 'life', 'cost', 'held_cost', hold, 'iterations')
local mine = known[5]
local others = tonumber(known[4] or '0') - tonumber(mine or '0')
local over = cost_cap ~= '' and tonumber(known[3] or '0') + others + tonumber(cost) > tonumber(cost_cap)
if keep_ms == '' then
  local next_number = known[1] and 0 or tonumber(known[6] or '0') + 1
  return {next_number, others, over and 1 or 0, redis.call('HMGET', task, unpack(ARGV, first_field))}
end
redis.call('PEXPIRE', task, keep_ms)
local number = 0
if not known[1] then
  local life, counted, state = string.match(redis.call('GET', marker) or '', '^([^:]+):(%d+):(%a+)$')
  if life and life == known[2] then
    number = tonumber(counted)
    if state == 'in' then
      redis.call('PEXPIRE', marker, marker_keep_ms)
    end
    over = over or only_first
  elseif not life then
    life, state = known[2], 'in'
    if not life then
      local time = redis.call('TIME')
      life = time[1] .. '.' .. time[2]
      redis.call('HSET', task, 'life', life)
      redis.call('PEXPIRE', task, keep_ms)
    end
    number = redis.call('HINCRBY', task, 'iterations', 1)
    redis.call('SET', marker, life .. ':' .. number .. ':in', 'PX', marker_keep_ms)
  end
  if number > 0 and state == 'in' and not over then
    if mine then
      redis.call('HINCRBY', task, 'held_cost', '-' .. mine)
      redis.call('HDEL', task, hold)
    end
    if cost ~= '0' then
      redis.call('HINCRBY', task, 'held_cost', cost)
      redis.call('HSET', task, hold, cost)
    end
  end
end
return {number, others, over and 1 or 0, redis.call('HMGET', task, unpack(ARGV, first_field))}
