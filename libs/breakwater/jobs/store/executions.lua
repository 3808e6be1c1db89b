-- The scripts of executions. KEYS: execution, but where a script says otherwise.
-- Notices are for the holder of the claim: cancel requests, '~<job>' for each job that waits for it, and '' where it
-- has children that belong to its task. All may come before the job has begun.

-- True if another handling has an execution, or there was none that Redis could have lost. One that was released before Redis
-- had its data may have been claimed since: a replica became the primary, which had not received that.
local function is_anothers(key, holder, token, kept_since_key)
  if holder == token or (not holder and redis.call('EXISTS', key) == 0) then
    return false
  end
  local released = not holder and redis.call('HGET', key, 'released')
  return not released or tonumber(released) > tonumber(redis.call('GET', kept_since_key) or '0')
end

--- claim
-- Takes a job for one handling of it, which is named by its token. The holder keeps the claim for as long as it renews it,
-- whatever NATS delivers meanwhile. Once the lease has ended, another handling takes the job when it has asked twice, grace_ms
-- apart, and the holder has not renewed it in between: Redis itself may have been stopped, or its clock have jumped.
-- An execution has one digest, of the content of its job: another job with the same id never gets it.
-- While Redis has its data for less than grace_ms, a job that was delivered before and that it knows nothing of may have a
-- holder all the same, which writes its claim again in that time. Where none does, and Redis has its data for less long than
-- the job exists, an earlier handling may have been calling when it died, and Redis has lost its checkpoint.
-- A message that may not be the only one of its job, and that Redis knows nothing of, is not a new job for certain while Redis
-- has its data for less than held_ms: a worker that stands still may hold an earlier message, and Redis have lost its claim.
-- The caller looks for it once for each beginning of the data (checked_since).
-- KEYS: execution, notices, notes of the jobs that were accepted at its time, since when Redis has its data
-- Returns {'conflict', 0}, {'yours', checkpoint or '', notice…}, {'taken', ms until it may be asked for with success} or
-- {'held?', since when Redis has its data}, where the caller has to look for an earlier message. '?' among the notices: a checkpoint may be lost.
local token, lease_ms, grace_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local keep_ms, digest, tenant, task, owner = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8] -- but for the first '' for none
local now, execution_id, run = now_ms(), ARGV[9], ARGV[10]
local redelivered = ARGV[11] == '1'
local accepted_ms = tonumber(ARGV[12]) -- none for a message that no handling had before
local checked_since, held_ms = tonumber(ARGV[14]), tonumber(ARGV[15]) -- none for the only message of a job
local known = redis.call('HMGET', KEYS[1], 'token', 'lease_until', 'asked_at', 'checkpoint', 'digest', 'lost', 'wait')
local lost = known[6]
local holder, lease_until, asked_at = known[1], tonumber(known[2]), tonumber(known[3])
if digest ~= '' and known[5] and known[5] ~= '' and known[5] ~= digest then
  return {'conflict', 0}
end
if (redelivered or checked_since) and redis.call('EXISTS', KEYS[1]) == 0 then
  local kept_since = tonumber(redis.call('GET', KEYS[4]) or 'inf')
  if kept_since > now then -- it is missing, or the clock was ahead when it was written
    redis.call('SET', KEYS[4], now)
    kept_since = now
  end
  if redelivered and kept_since + grace_ms > now then
    return {'taken', kept_since + grace_ms - now}
  end
  if checked_since and checked_since ~= kept_since and kept_since + held_ms > now then
    return {'held?', kept_since}
  end
  lost = redelivered and accepted_ms and kept_since > accepted_ms
end
if holder and holder ~= token then
  if lease_until > now then
    return {'taken', lease_until - now + grace_ms}
  end
  if not asked_at then
    redis.call('HSET', KEYS[1], 'asked_at', now)
    return {'taken', grace_ms}
  end
  if asked_at + grace_ms > now then
    return {'taken', asked_at + grace_ms - now}
  end
  redis.call('HSET', KEYS[1], 'taken_over', 1)
end
local fields, note = {'token', token, 'lease_until', now + lease_ms}, redis.call('HGET', KEYS[3], execution_id)
if note then
  fields[5], fields[6] = 'note', note
  redis.call('HDEL', KEYS[3], execution_id)
end
if digest ~= '' or not known[5] then -- its absence shows that Redis has lost the execution
  fields[#fields + 1], fields[#fields + 2] = 'digest', digest
end
if lost then -- kept for the next claim, in case this one saves no checkpoint
  fields[#fields + 1], fields[#fields + 2] = 'lost', 1
end
if known[7] then -- what the job waited for before
  fields[#fields + 1], fields[#fields + 2] = 'wait', ''
end
for name, value in pairs({tenant = tenant, task = task, owner = owner, run = run, task_id = ARGV[13]}) do
  if value ~= '' then
    fields[#fields + 1], fields[#fields + 2] = name, value
  end
end
redis.call('HSET', KEYS[1], unpack(fields))
if asked_at then
  redis.call('HDEL', KEYS[1], 'asked_at')
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
local notices = redis.call('HVALS', KEYS[2])
if lost and not known[4] then
  notices[#notices + 1] = '?'
end
return {'yours', known[4] or '', unpack(notices)}

--- checkpoint
-- Saves a job's checkpoint and renews the lease of its claim, if that is still ours. An execution that Redis knows nothing of,
-- or no claim of, is still that of its holder: Redis has lost it, and no other handling has asked for the job since.
-- KEYS: execution, notices, since when Redis has its data
-- Returns 0 where the claim is not ours; else 1, or the notices where there are any. '?' among them: Redis has lost what was
-- saved, and the holder must restore it. Until then the claim is not released.
local token, lease_ms, keep_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3] -- a lease of 0 releases the claim
local checkpoint, wait = ARGV[4], ARGV[5] -- '' renews only; what the job waits for, none to leave that as it is
local known = redis.call('HMGET', KEYS[1], 'token', 'asked_at', 'digest')
if is_anothers(KEYS[1], known[1], token, KEYS[3]) then
  return 0
end
local is_lost = not known[3] or known[1] ~= token
if lease_ms == 0 and is_lost then
  return {'?'}
end
local fields = checkpoint ~= '' and {'checkpoint', checkpoint} or {}
if wait then
  fields[#fields + 1], fields[#fields + 2] = 'wait', wait
end
if lease_ms == 0 then
  redis.call('HDEL', KEYS[1], 'token', 'lease_until')
  fields[#fields + 1], fields[#fields + 2] = 'released', now_ms()
else
  local n = #fields
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'token', token, 'lease_until', now_ms() + lease_ms
end
if #fields > 0 then
  redis.call('HSET', KEYS[1], unpack(fields))
end
if known[2] then
  redis.call('HDEL', KEYS[1], 'asked_at')
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
local notices = redis.call('HVALS', KEYS[2])
if is_lost then
  notices[#notices + 1] = '?'
end
return #notices > 0 and notices or 1

--- restore
-- Writes all that the holder of a claim knows of an execution that Redis has lost, if no other handling has it by now.
-- KEYS: execution, since when Redis has its data
-- Returns 0 where one has.
local token, lease_ms, keep_ms, checkpoint = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] -- a lease of 0 releases the claim
local partial, messages, digest, names = ARGV[5], ARGV[6], ARGV[7], {'tenant', 'task', 'owner', 'run', 'task_id'}
if is_anothers(KEYS[1], redis.call('HGET', KEYS[1], 'token'), token, KEYS[2]) then
  return 0
end
local fields = {'digest', digest}
if checkpoint ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'checkpoint', checkpoint
end
if messages ~= '0' then
  fields[#fields + 1], fields[#fields + 2] = 'partial', partial
  fields[#fields + 1], fields[#fields + 2] = 'messages', messages
end
for i, name in ipairs(names) do
  if ARGV[7 + i] ~= '' then
    fields[#fields + 1], fields[#fields + 2] = name, ARGV[7 + i]
  end
end
if lease_ms == 0 then
  redis.call('HDEL', KEYS[1], 'token', 'lease_until')
  fields[#fields + 1], fields[#fields + 2] = 'released', now_ms()
else
  fields[#fields + 1], fields[#fields + 2] = 'token', token
  fields[#fields + 1], fields[#fields + 2] = 'lease_until', now_ms() + lease_ms
  redis.call('HDEL', KEYS[1], 'asked_at')
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1

--- finish
-- Ends the claim of a job whose record is published, if it is still ours; without a token, that of any holder. It lingers: a
-- message of the same job that was on its way meanwhile must find a claim, and then the record. A job that was taken over is
-- kept, with its token: its first holder may come back at any time, and must not take a missing claim for one that Redis has
-- lost.
-- KEYS: execution, notices
-- Returns 0 where the claim is not ours; else 1, or where the job has a task or any notices: {its tenant or '', its task or '',
-- the notices}. The task of one that has children is its own id, also to a caller that asks again.
local token, linger_ms, own_task = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local known = redis.call('HMGET', KEYS[1], 'token', 'taken_over', 'tenant', 'task')
if token ~= '' and known[1] ~= token then
  return 0
end
local notices, task = redis.call('HVALS', KEYS[2]), known[4]
if #notices > 0 then
  task = task or (redis.call('HEXISTS', KEYS[2], 'children') == 1 and own_task)
  redis.call('DEL', KEYS[2])
end
local ended = (task or #notices > 0) and {known[3] or '', task or '', unpack(notices)} or 1
if token == '' and redis.call('EXISTS', KEYS[1]) == 0 then
  return ended
end
redis.call('HDEL', KEYS[1], 'checkpoint', 'asked_at', 'partial', 'messages', 'wait')
redis.call('HSET', KEYS[1], 'lease_until', now_ms() + linger_ms, 'ended', 1)
if not known[2] then
  redis.call('PEXPIRE', KEYS[1], linger_ms)
end
if task and not known[4] then
  redis.call('HSET', KEYS[1], 'task', task)
end
return ended

--- free
-- Ends the claim of a worker that is dead, if the job is still its own. As one that was taken over, so that nothing that
-- comes of this worker after all is taken for what Redis has lost.
-- Returns 'freed'; 'unclaimed' where no worker has the job, or Redis has lost the claim; 'held' where another one has it.
local token, worker = redis.call('HGET', KEYS[1], 'token'), ARGV[1]
if not token then
  return 'unclaimed'
end
if string.sub(token, 1, #worker) ~= worker then
  return 'held'
end
redis.call('HDEL', KEYS[1], 'token', 'lease_until', 'asked_at', 'released')
redis.call('HSET', KEYS[1], 'taken_over', 1)
return 'freed'

--- append_partial
-- Appends to the part of a job's answer that is out, if the claim is still ours: the next holder goes on there. A message
-- that is repeated is appended once. KEYS: execution, since when Redis has its data
-- Returns 1, or 0 where the claim is not ours; {'?'} where Redis has lost what was saved, and the holder must restore it.
local known, number = redis.call('HMGET', KEYS[1], 'token', 'digest', 'messages', 'partial'), tonumber(ARGV[3])
if is_anothers(KEYS[1], known[1], ARGV[1], KEYS[2]) then
  return 0
end
local before = tonumber(known[3] or '0')
if not known[2] or known[1] ~= ARGV[1] or (before ~= number and before ~= number - 1) then
  return {'?'}
end
if before ~= number then
  redis.call('HSET', KEYS[1], 'partial', (known[4] or '') .. ARGV[2], 'messages', number)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return 1

--- cancel
-- Leaves a request to cancel an execution, for the worker that has it or takes it; the first of each sender counts.
-- KEYS: notices
-- Returns the request that counts.
local who, request, keep_ms = ARGV[1], ARGV[2], ARGV[3]
redis.call('HSETNX', KEYS[1], who, request)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return redis.call('HGET', KEYS[1], who)

--- parent
-- Looks at a job of the tenant for a child of it. One that has no task but its own learns that it has children there, also
-- where it is not begun yet.
-- KEYS: execution and notices of the parent
-- Returns {its task's key or '', its checkpoint or '', its run or '', its task's id or '' where that is the key}: four times ''
-- where nothing is known of such a job; {others, '', '', ''} where it is of another owner.
local tenant, dry_run, keep_ms = ARGV[1], ARGV[2], ARGV[3] -- tenant '' for none; dry_run '1': it learns nothing
local owner, others = ARGV[4], ARGV[5] -- owner '' for any
local known = redis.call('HMGET', KEYS[1], 'tenant', 'task', 'checkpoint', 'owner', 'run', 'task_id')
if owner ~= '' and (known[4] or '') ~= owner and redis.call('EXISTS', KEYS[1]) == 1 then
  return {others, '', '', ''}
end
if (known[1] or '') ~= tenant and redis.call('EXISTS', KEYS[1]) == 1 then
  return {'', '', '', ''}
end
if not known[2] and dry_run == '0' then
  redis.call('HSET', KEYS[2], 'children', '')
  redis.call('PEXPIRE', KEYS[2], keep_ms)
end
return {known[2] or '', known[3] or '', known[5] or '', known[6] or ''}

--- unseen
-- Counts a request to cancel a job of which nothing is known, by the user that gave it; each job once.
-- KEYS: the user's
-- Returns 1, or 0 where there are too many.
local job, most, keep_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - keep_ms)
if redis.call('ZSCORE', KEYS[1], job) == false and redis.call('ZCARD', KEYS[1]) >= most then
  return 0
end
redis.call('ZADD', KEYS[1], now, job)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1

--- partial
return redis.call('HMGET', KEYS[1], 'partial', 'messages')

--- wait
-- KEYS: notices; for a job of which nothing is known, also those unknown ones that jobs of the same owner wait for: the id of
-- each until when it is kept
-- A job that finds no room here looks again by itself.
local waiting, keep_ms, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if KEYS[2] then
  local id, most_unknown, now = ARGV[4], tonumber(ARGV[5]), now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], 0, now)
  if redis.call('ZSCORE', KEYS[2], id) == false and redis.call('ZCARD', KEYS[2]) >= most_unknown then
    return 0
  end
  redis.call('ZADD', KEYS[2], 'GT', now + keep_ms, id)
  keep(KEYS[2], keep_ms)
end
if redis.call('HLEN', KEYS[1]) < most then
  redis.call('HSET', KEYS[1], 'waits/' .. waiting, '~' .. waiting)
end
keep(KEYS[1], keep_ms)
return 1

--- woken
-- Notes that a parked job was returned to its queue: its message on PARKED, by its sequence, says nothing of it any more.
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'woken', ARGV[1])
end
return 1

--- notices
-- KEYS: notices
return redis.call('HVALS', KEYS[1])
