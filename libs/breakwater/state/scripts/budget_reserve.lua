-- Reserves the worst case of a call from all its budgets, or from none. Asking again reserves it once, and renews the lease.
-- KEYS: reservations, leases, filled, day, month
-- ARGV from the 14th, for each scope: key, hard limit of the day, of the month ('' = none)
-- Returns {1, when it was reserved} or {0, index of the refusing scope from 1, 'daily' or 'monthly', limit, spent, reserved},
-- {2, now} where that is in another day or month, {3} where the counters are lost and a cap could not be held.
local attempt_id, worst_case, asked_at = ARGV[1], ARGV[2], ARGV[4] -- asked_at '': now
local lease_ms = tonumber(ARGV[3]) -- '': only looks, and reserves nothing
local day_name, month_name = ARGV[5], ARGV[6]
local day_start, day_end, month_start, month_end = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local keep_until_ms, owner, first_scope = {ARGV[11], ARGV[12]}, ARGV[13], 14 -- of the day and of the month
local reservations, leases, filled_key, periods = KEYS[1], KEYS[2], KEYS[3], {KEYS[4], KEYS[5]}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', reservations, attempt_id)
local state, before, since, day, month
if held then
  state, before, since, day, month = string.match(held, '^(%a)|(%d+)|(%d+)|([^|]+)|([^|]+)|')
  if state ~= 'r' or before == worst_case or day ~= day_name or month ~= month_name then
    if state == 'r' and lease_ms then
      redis.call('ZADD', leases, 'GT', now + lease_ms, attempt_id)
    end
    return {1, since}
  end
end
local at = tonumber(since or asked_at) or now
if at < day_start or at >= day_end or at < month_start or at >= month_end then
  return {2, now}
end
-- Reserved with another amount, for another model, by a worker that lost the job: the difference is what is asked for.
local amount, filled = tonumber(worst_case) - tonumber(before or '0'), false
local fields, known, kept_out = {}, {}, nil
for i = first_scope, #ARGV, 3 do
  local scope, n = ARGV[i], #fields
  fields[n + 1], fields[n + 2], fields[n + 3] = 'spent:' .. scope, 'reserved:' .. scope, 'cap:' .. scope
end
for i = first_scope, #ARGV, 3 do
  local first = i - first_scope + 1
  for window = 1, 2 do
    local cap = ARGV[i + window]
    if cap ~= '' then
      filled = filled or redis.call('HEXISTS', filled_key, 'log') == 1
      if not filled then
        return {3}
      end
      known[window] = known[window] or redis.call('HMGET', periods[window], unpack(fields))
      local spent, reserved, note = known[window][first], known[window][first + 1], known[window][first + 2]
      local limit = tonumber(cap)
      local raised, over = string.match(note or '', '^(%d+):(%d+)$') -- by a person, over a cap that may have changed since
      if over == cap then
        limit = math.max(limit, tonumber(raised))
      end
      local left = limit - tonumber(spent or '0') -- added up, a double might not hold them
      if amount > left - tonumber(reserved or '0') then
        local index, named = (i - first_scope) / 3 + 1, window == 1 and 'daily' or 'monthly'
        local refusal = {0, index, named, string.format('%.0f', limit), spent or '0', reserved or '0'}
        if amount > left then
          return refusal
        end
        kept_out = kept_out or refusal -- by calls in flight, which mostly cost less: a budget that is spent precedes it
      end
    end
  end
end
if kept_out then
  return kept_out
end
at = string.format('%.0f', at)
if not lease_ms then
  return {1, at}
end
for window = 1, 2 do
  for i = first_scope, #ARGV, 3 do
    local reserved = redis.call('HINCRBY', periods[window], 'reserved:' .. ARGV[i], string.format('%.0f', amount))
    if reserved == amount then -- nothing else is reserved, and maybe nothing was counted yet
      redis.call('PEXPIREAT', periods[window], keep_until_ms[window])
    end
  end
end
-- state 'r': reserved; 's': its worker charged what it cost; 'e': its lease ended and it was charged at the estimate.
redis.call('HSET', reservations, attempt_id, table.concat({'r', worst_case, at, day_name, month_name, owner}, '|'))
redis.call('ZADD', leases, now + lease_ms, attempt_id)
return {1, at}
