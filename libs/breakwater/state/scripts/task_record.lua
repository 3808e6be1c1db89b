-- Counts what a job of a task used and how it ended, once, in place of what it holds. A job that never asked to call is
-- an iteration all the same, and one that was refused without a call is none.
-- KEYS: task, marker of the execution (see task_enter)   ARGV from the 11th: fields to read
-- Returns the fields.
local keep_ms, marker_keep_ms, tokens, cost = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local failed, called = ARGV[5], ARGV[6] -- each 1 or 0; failed is '' where the job was refused
local error_identity, confidence = ARGV[7], ARGV[8] -- each '' for none
local most, execution, first_field = tonumber(ARGV[9]), ARGV[10], 11 -- most errors and confidences kept
local task, marker = KEYS[1], KEYS[2]
local life, number, state = string.match(redis.call('GET', marker) or '', '^([^:]+):(%d+):(%a+)$')
local known = redis.call('HMGET', task, 'life', 'errors', 'confidences')
if life and life ~= known[1] then
  state = 'done' -- of a life that is over: the task was reset while the job ran
end
if state ~= 'done' then
  local now_life = known[1]
  if not now_life then
    local time = redis.call('TIME')
    now_life = time[1] .. '.' .. time[2]
    redis.call('HSET', task, 'life', now_life)
  end
  if failed == '' and called == '0' then
    if life == now_life then
      redis.call('HINCRBY', task, 'iterations', -1)
    end
    number = 0
  elseif life ~= now_life then
    number = redis.call('HINCRBY', task, 'iterations', 1)
  end
  local hold = 'h:' .. execution
  local held = redis.call('HGET', task, hold)
  if held then
    redis.call('HINCRBY', task, 'held_cost', '-' .. held)
    redis.call('HDEL', task, hold)
  end
  redis.call('HINCRBY', task, 'tokens', tokens)
  redis.call('HINCRBY', task, 'cost', cost)
  if failed == '1' then
    redis.call('HINCRBY', task, 'consecutive_failures', 1)
    redis.call('HINCRBY', task, 'total_failures', 1)
  elseif failed == '0' then
    redis.call('HSET', task, 'consecutive_failures', 0)
  end
  if error_identity ~= '' then
    -- 'identity=count identity=count', the one that came last at the end.
    local kept, times, fewest, rarest = {}, 1, nil, nil
    for identity, count in string.gmatch(known[2] or '', '([^ =]+)=(%d+)') do
      count = tonumber(count)
      if identity == error_identity then
        times = count + 1
      else
        kept[#kept + 1] = identity .. '=' .. count
        if not fewest or count < fewest then
          fewest, rarest = count, #kept
        end
      end
    end
    if #kept == most then
      table.remove(kept, rarest) -- of those that came the fewest times, the one that came longest ago
    end
    kept[#kept + 1] = error_identity .. '=' .. times
    redis.call('HSET', task, 'errors', table.concat(kept, ' '))
  end
  if confidence ~= '' then
    local kept = {}
    for earlier in string.gmatch(known[3] or '', '[^ ]+') do
      kept[#kept + 1] = earlier
    end
    kept[#kept + 1] = confidence
    redis.call('HSET', task, 'confidences', table.concat(kept, ' ', math.max(1, #kept - most + 1)))
  end
  redis.call('SET', marker, now_life .. ':' .. number .. ':done', 'PX', marker_keep_ms)
end
redis.call('PEXPIRE', task, keep_ms)
return redis.call('HMGET', task, unpack(ARGV, first_field))
