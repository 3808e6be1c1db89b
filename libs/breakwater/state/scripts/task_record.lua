-- Counts what a job of a task used and how it ended, once, in place of what it holds. A job that never asked to call is an iteration all the same,
-- and one that was refused without a call is none.
-- KEYS: task, marker of the execution (see task_enter)
-- ARGV: keep_ms, marker's keep_ms, tokens, cost, failed (1 or 0, '' where it was refused), called (1 or 0), identity of
--       the error or '', confidence or '', most errors and confidences kept, execution, fields to read...
-- Returns the fields.
local life, number, state = string.match(redis.call('GET', KEYS[2]) or '', '^([^:]+):(%d+):(%a+)$')
local task = KEYS[1]
local known = redis.call('HMGET', task, 'life', 'errors', 'confidences')
if life and life ~= known[1] then
  state = 'done' -- of a life that is over: the task was reset while the job ran
end
if state ~= 'done' then
  local now_life, most = known[1], tonumber(ARGV[9])
  if not now_life then
    local time = redis.call('TIME')
    now_life = time[1] .. '.' .. time[2]
    redis.call('HSET', task, 'life', now_life)
  end
  if ARGV[5] == '' and ARGV[6] == '0' then
    if life == now_life then
      redis.call('HINCRBY', task, 'iterations', -1)
    end
    number = 0
  elseif life ~= now_life then
    number = redis.call('HINCRBY', task, 'iterations', 1)
  end
  local hold = 'h:' .. ARGV[10]
  local held = redis.call('HGET', task, hold)
  if held then
    redis.call('HINCRBY', task, 'held_cost', '-' .. held)
    redis.call('HDEL', task, hold)
  end
  redis.call('HINCRBY', task, 'tokens', ARGV[3])
  redis.call('HINCRBY', task, 'cost', ARGV[4])
  if ARGV[5] == '1' then
    redis.call('HINCRBY', task, 'consecutive_failures', 1)
    redis.call('HINCRBY', task, 'total_failures', 1)
  elseif ARGV[5] == '0' then
    redis.call('HSET', task, 'consecutive_failures', 0)
  end
  if ARGV[7] ~= '' then
    -- 'identity=count identity=count', the one that came last at the end.
    local kept, times, fewest, rarest = {}, 1, nil, nil
    for error, count in string.gmatch(known[2] or '', '([^ =]+)=(%d+)') do
      count = tonumber(count)
      if error == ARGV[7] then
        times = count + 1
      else
        kept[#kept + 1] = error .. '=' .. count
        if not fewest or count < fewest then
          fewest, rarest = count, #kept
        end
      end
    end
    if #kept == most then
      table.remove(kept, rarest) -- of those that came the fewest times, the one that stayed away the longest
    end
    kept[#kept + 1] = ARGV[7] .. '=' .. times
    redis.call('HSET', task, 'errors', table.concat(kept, ' '))
  end
  if ARGV[8] ~= '' then
    local kept = {}
    for confidence in string.gmatch(known[3] or '', '[^ ]+') do
      kept[#kept + 1] = confidence
    end
    kept[#kept + 1] = ARGV[8]
    redis.call('HSET', task, 'confidences', table.concat(kept, ' ', math.max(1, #kept - most + 1)))
  end
  redis.call('SET', KEYS[2], now_life .. ':' .. number .. ':done', 'PX', ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('HMGET', KEYS[1], unpack(ARGV, 11))
