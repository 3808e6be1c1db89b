-- The scripts of plans. KEYS: plan.
-- Fields of a plan: the note of each job by its id; '\0<name>' for what a caller announced; '\1<id>' for the stage of a job,
-- 'p' pending, 'r' running, 's' succeeded, 'f' ended otherwise; '\2<stage>' for the number of jobs in it; '\3version', which
-- grows with each change; '\3last' for the last change, so that it is reported again after a crash; '\4' for its id as its
-- caller chose it, where that is not its key.
local plan = KEYS[1]
local function counts()
  local found = redis.call('HMGET', plan, '\2p', '\2r', '\2s', '\2f')
  for at = 1, 4 do
    found[at] = tonumber(found[at] or '0')
  end
  return found
end
local function noted(newest, plan_key, plan_id, keep_s, now_ms)
  if plan_id ~= '' then
    redis.call('HSET', plan, '\4', plan_id)
  end
  redis.call('EXPIRE', plan, keep_s)
  redis.call('ZADD', newest, now_ms, plan_key)
  redis.call('ZREMRANGEBYSCORE', newest, 0, now_ms - keep_s * 1000)
end

--- announce
-- Notes a plan without jobs: a draft, or one that was refused. Each costs memory and no job: their number has a limit.
-- KEYS: plan, all plans, those that the caller announced
-- Returns {1, version, what it announced before or '', number of jobs in each stage…}; {0} where there are too many.
local plan_key, by, refusal, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local keep_s, now_ms = tonumber(ARGV[5]), tonumber(ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[3], 0, now_ms - keep_s * 1000)
if redis.call('ZSCORE', KEYS[3], plan_key) == false and redis.call('ZCARD', KEYS[3]) >= most then
  return {0}
end
redis.call('ZADD', KEYS[3], now_ms, plan_key)
redis.call('EXPIRE', KEYS[3], keep_s)
local before = redis.call('HGET', plan, '\0' .. by) or ''
redis.call('HSET', plan, '\0' .. by, refusal)
local version = redis.call('HINCRBY', plan, '\3version', 1)
noted(KEYS[2], plan_key, ARGV[7], keep_s, now_ms)
return {1, version, before, unpack(counts())}

--- change
-- Brings jobs to a stage, unless they have reached a later one, and notes those that are new. The plan is no draft of the
-- caller any more.
-- KEYS: plan, all plans, those that the caller announced
-- ARGV: plan, caller or '', stage, keep_s, now_ms, its id where that is not its key or '', then of each job its id, and its note or '' for one that is known
-- Returns {version, what the caller had announced or '', jobs in each stage before…, and after…}; {} where nothing changed.
local rank = {p = 1, r = 2, s = 3, f = 3}
local plan_key, by, stage, keep_s, now_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local before, changed, announced = counts(), false, false
for at = 7, #ARGV, 2 do
  local id, note = ARGV[at], ARGV[at + 1]
  local old = redis.call('HGET', plan, '\1' .. id)
  if (note ~= '' or redis.call('HEXISTS', plan, id) == 1) and (not old or rank[old] < rank[stage]) then
    if note ~= '' then
      redis.call('HSETNX', plan, id, note)
    end
    redis.call('HSET', plan, '\1' .. id, stage)
    redis.call('HINCRBY', plan, '\2' .. stage, 1)
    if old then
      redis.call('HINCRBY', plan, '\2' .. old, -1)
    end
    changed = true
  end
end
local name = stage .. (ARGV[7] or '')
if not changed then
  local last = redis.call('HGET', plan, '\3last')
  last = last and cjson.decode(last)
  return last and last[1] == name and last[2] or {}
end
if by ~= '' then
  announced = redis.call('HGET', plan, '\0' .. by)
  redis.call('HDEL', plan, '\0' .. by)
  redis.call('ZREM', KEYS[3], plan_key)
end
local after = counts()
local change = {tostring(redis.call('HINCRBY', plan, '\3version', 1)), announced or ''}
for at = 1, 8 do
  change[2 + at] = tostring(at > 4 and after[at - 4] or before[at])
end
redis.call('HSET', plan, '\3last', cjson.encode({name, change}))
noted(KEYS[2], plan_key, ARGV[6], keep_s, now_ms)
return change

--- withdraw
-- Forgets jobs that were not accepted after all. ARGV: their ids
for _, id in ipairs(ARGV) do
  local old = redis.call('HGET', plan, '\1' .. id)
  if old then
    redis.call('HINCRBY', plan, '\2' .. old, -1)
  end
  redis.call('HDEL', plan, id, '\1' .. id)
end
return redis.call('HDEL', plan, '\3last')
