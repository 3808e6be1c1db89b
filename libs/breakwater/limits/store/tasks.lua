-- The scripts of tasks. KEYS: task; marker of the execution, where a script says so.
-- A marker is '<life>:<number>:<in or done>'. A task that was reset or forgotten starts a new life, in which the jobs of
-- the one before count for nothing: their number is 0, and they hold nothing.
-- The hold of a job is the field 'h:<execution>', none where it is 0; 'held_cost' is the sum of all.
local task = KEYS[1]
local function read(from, at_ms)
  local fields = redis.call('HMGET', from, 'iterations', 'tokens', 'cost', 'consecutive_failures', 'total_failures',
    'errors', 'confidences', 'rule', 'reason', 'agent', 'execution', 'at_ms', 'published', 'task_id', 'life',
    'warned')
  fields[#fields + 1] = at_ms or 0
  return fields
end
local function tick() -- the time in ms; no two of a task are the same, so that they tell what came first
  local at_ms = math.max(now_ms(), tonumber(redis.call('HGET', task, 'clock') or '0') + 1)
  redis.call('HSET', task, 'clock', string.format('%.0f', at_ms))
  return at_ms
end
local function marked(marker)
  return string.match(redis.call('GET', marker) or '', '^([^:]+):(%d+):(%a+)$')
end
local function begin_life()
  local time = redis.call('TIME')
  local life = time[1] .. '.' .. time[2]
  redis.call('HSET', task, 'life', life)
  return life
end
local function hold(execution, held, cost) -- held: what the job held so far
  if held then
    redis.call('HINCRBY', task, 'held_cost', '-' .. held)
    redis.call('HDEL', task, 'h:' .. execution)
  end
  if cost ~= '0' then
    redis.call('HINCRBY', task, 'held_cost', cost)
    redis.call('HSET', task, 'h:' .. execution, cost)
  end
end

--- enter
-- Admits a call of a job of a task: its iteration is counted, once however often it asks, and never while the task is
-- tripped; and the most that the job may have cost after the call is held, if the cost cap has room for it.
-- KEYS: task, marker
-- Returns {number of the iteration (0 while tripped), held for other jobs, over the cap (1 or 0), the fields}.
local keep_ms, marker_keep_ms = ARGV[1], ARGV[2] -- keep_ms '': only looks, as a job that has not entered yet
local execution, cost, cost_cap = ARGV[3], ARGV[4], ARGV[5] -- cost_cap '': none
local only_first = ARGV[6] == '1' -- the hold of a job that has entered before stays as it is
local steps = ARGV[7] -- iterations that the job is: 1, or 0
local known = redis.call('HMGET', task, 'rule', 'life', 'cost', 'held_cost', 'h:' .. execution, 'iterations')
local others = tonumber(known[4] or '0') - tonumber(known[5] or '0')
local over = cost_cap ~= '' and tonumber(known[3] or '0') + others + tonumber(cost) > tonumber(cost_cap)
if keep_ms == '' then
  return {known[1] and 0 or tonumber(known[6] or '0') + 1, others, over and 1 or 0, read(task)}
end
redis.call('PEXPIRE', task, keep_ms)
local number = 0
if not known[1] then
  local life, counted, state = marked(KEYS[2])
  if life and life == known[2] then
    number = tonumber(counted)
    if state == 'in' then
      redis.call('PEXPIRE', KEYS[2], marker_keep_ms)
    end
    over = over or only_first
  elseif not life then
    life, state = known[2] or begin_life(), 'in'
    redis.call('PEXPIRE', task, keep_ms)
    number = math.max(1, redis.call('HINCRBY', task, 'iterations', steps))
    redis.call('SET', KEYS[2], life .. ':' .. number .. ':in', 'PX', marker_keep_ms)
  end
  if number > 0 and state == 'in' and not over then
    hold(execution, known[5], cost)
  end
end
local at_ms = (number > 0 or known[1]) and tick() or now_ms()
return {number, others, over and 1 or 0, read(task, at_ms)}

--- shrink
-- Holds no more for a job than it has spent, as it is at no call. A job of a life that is over has no hold to shrink.
local execution, spent = ARGV[1], ARGV[2]
local held = redis.call('HGET', task, 'h:' .. execution)
if held and tonumber(held) > tonumber(spent) then
  hold(execution, held, spent)
end
return 1

--- record
-- Counts the usage and the end of a job of a task, once, in place of its hold. A job that never asked to call is an
-- iteration all the same, and one that was refused without a call is none.
-- KEYS: task, marker
-- Returns the fields; their time is 0 where the job is not counted now.
local keep_ms, marker_keep_ms, tokens, cost = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local failed, called = ARGV[5], ARGV[6] -- each 1 or 0; failed is '' where the job was refused
local error_identity, confidence = ARGV[7], ARGV[8] -- each '' for none
local most, execution = tonumber(ARGV[9]), ARGV[10] -- most errors and confidences kept
local steps = ARGV[11] -- iterations that the job is: 1, or 0
local life, number, state = marked(KEYS[2])
local known = redis.call('HMGET', task, 'life', 'errors', 'confidences')
if life and life ~= known[1] then
  state = 'done' -- of a life that is over: the task was reset while the job ran
end
if state ~= 'done' then
  local now_life = known[1] or begin_life()
  if failed == '' and called == '0' then
    if life == now_life then
      redis.call('HINCRBY', task, 'iterations', -steps)
    end
    number = 0
  elseif life ~= now_life then
    number = math.max(1, redis.call('HINCRBY', task, 'iterations', steps))
  end
  hold(execution, redis.call('HGET', task, 'h:' .. execution), '0')
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
  redis.call('SET', KEYS[2], now_life .. ':' .. number .. ':done', 'PX', marker_keep_ms)
end
local at_ms = state ~= 'done' and tick() or nil
redis.call('PEXPIRE', task, keep_ms)
return read(task, at_ms)

--- trip
-- Stops a task, unless it is stopped already: the first trip counts.
-- Returns the fields.
local keep_ms, rule, reason, agent, execution = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local at_ms, published = ARGV[6], ARGV[7] -- at_ms '': now; published: 1 where its event is published already, else 0
local task_id = ARGV[8] -- '' where it is the key
if redis.call('HEXISTS', task, 'rule') == 0 then
  if at_ms == '' then
    at_ms = string.format('%.0f', tick())
  end
  redis.call('HSET', task, 'rule', rule, 'reason', reason, 'agent', agent, 'execution', execution,
    'at_ms', at_ms, 'published', published)
  if task_id ~= '' then
    redis.call('HSET', task, 'task_id', task_id)
  end
end
redis.call('PEXPIRE', task, keep_ms)
return read(task)

--- published
-- Records that the event of a task's trip has been published, if it is tripped.
-- Returns when it tripped (ms), or ''.
local at = redis.call('HGET', task, 'at_ms')
if at then
  redis.call('HSET', task, 'published', 1)
end
return at or ''

--- warned
-- Records that people were notified of a life of the task that is near a cap.
if redis.call('HGET', task, 'life') == ARGV[1] then
  redis.call('HSET', task, 'warned', 1)
end
return 1

--- reset
-- Forgets a task, and returns its fields. A copy is kept for a moment, for a caller that asks again as the answer was lost.
-- KEYS: task, copy
if redis.call('EXISTS', task) == 1 then
  redis.call('RENAME', task, KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return read(KEYS[2])

--- load
return read(task)

--- unlist
-- Takes a task off the list of those tripped, unless it has tripped again meanwhile.
-- KEYS: list
local name, listed_at_ms = ARGV[1], ARGV[2]
if redis.call('ZSCORE', KEYS[1], name) == listed_at_ms then
  redis.call('ZREM', KEYS[1], name)
end
return 1

--- forget
-- Deletes a task, or the breaker of one, that rests. Returns 'stopped' or 'in use' where it may not.
if redis.call('HEXISTS', task, 'rule') == 1 then
  return 'stopped'
end
local left_ms = redis.call('PTTL', task) -- -1 of a breaker that an operator has isolated
if left_ms == -1 or left_ms > tonumber(ARGV[1]) then
  return 'in use'
end
return redis.call('UNLINK', task)
