-- Reserves the worst case of a call from all its budgets, or from none. Asking again reserves it once, and renews the lease.
-- While others call under a hard cap, a caller, and so a tenant, holds at most half of what is not spent of it.
-- KEYS: reservations, leases, filled, day, month, held
-- ARGV from the 16th, for each scope: key, hard limit of the day, of the month ('' = none)
-- Returns {1, when it was reserved} or {0, index of the refusing scope from 1, 'daily' or 'monthly', limit, spent, reserved,
-- 1 where it is the share that has no room}, {2, now} where that is in another day or month, {3} where the counters are lost
-- and a cap could not be held, {4} where the sender has named too many tenants in the month.
local attempt_id, worst_case, asked_at = ARGV[1], ARGV[2], ARGV[4] -- asked_at '': now
local lease_ms = tonumber(ARGV[3]) -- '': only looks, and reserves nothing
local day_name, month_name = ARGV[5], ARGV[6]
local day_start, day_end, month_start, month_end = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local keep_until_ms, owner, first_scope = {ARGV[11], ARGV[12]}, ARGV[13], 16 -- of the day and of the month
local most_tenants, sender = ARGV[14], ARGV[15] -- most_tenants '': none, or one that is known to exist
local reservations, leases, filled_key, periods, held_key = KEYS[1], KEYS[2], KEYS[3], {KEYS[4], KEYS[5]}, KEYS[6]
local LATELY_MS = 60000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', reservations, attempt_id)
local state, before, since, day, month, owner_before
if held then
  state, before, since, day, month, owner_before = string.match(held, '^(%a)|(%d+)|(%d+)|([^|]+)|([^|]+)|(.*)$')
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
-- Counters that nobody has had yet in the month are made for so many tenants of one sender, who may name any.
local tenants = 'tenants:' .. sender
local is_new = most_tenants ~= '' and lease_ms and redis.call('HEXISTS', KEYS[5], 'reserved:' .. ARGV[#ARGV - 2]) == 0
if is_new and tonumber(redis.call('HGET', KEYS[5], tenants) or '0') >= tonumber(most_tenants) then
  return {4}
end
-- Reserved with another amount, for another model, by a worker that lost the job: the difference is what is asked for.
local amount, filled = tonumber(worst_case) - tonumber(before or '0'), false
local fields, known, kept_out = {}, {}, nil
for i = first_scope, #ARGV, 3 do
  for _, name in ipairs({'spent:', 'reserved:', 'cap:', 'tenant_asked:', 'caller_asked:'}) do
    fields[#fields + 1] = name .. ARGV[i]
  end
end
-- Whose call it is, as the fields of `held` have it, where a cap is hard: '<agent>\n<tenant>\n<caller>'.
local OWNER = '^(.-)\n(.-)\n(.*)$'
local agent, tenant, caller = string.match(owner, OWNER)
local holders
local function share_of(mine, index, scope) -- what the same tenant (index 2) or caller (3) holds, and whether others do
  if not holders then
    holders = {}
    local flat = redis.call('HGETALL', held_key)
    for i = 1, #flat, 2 do
      holders[#holders + 1] = {string.match(flat[i], OWNER)}
      holders[#holders][4] = tonumber(flat[i + 1])
    end
  end
  local own, others = 0, false
  for _, one in ipairs(holders) do
    if scope == 'global' or scope == 'agent:' .. one[1] or scope == 'tenant:' .. one[2] then
      if one[index] == mine then
        own = own + one[4]
      else
        others = true
      end
    end
  end
  return own, others
end
local notes = {{}, {}} -- who asked last, of the day and of the month
-- Whether a tenant or a caller asks for more than its share of what is left, and notes that it asked. What is noted is when
-- and for how much the last one asked, and the last one that was another: '<ms>|<amount>|<ms>|<amount>|<name>'. Who needs
-- more than a share has no share that others could take.
local function is_over_share(window, field, note, mine, index, scope, left, reserved)
  local at_ms, asked, other_ms, other_asked, name = string.match(note or '', '^(%d+)|(%d+)|(%d+)|(%d+)|(.*)$')
  if name ~= mine then
    other_ms, other_asked = at_ms or '0', asked or '0'
  end
  local total = amount + tonumber(before or '0')
  if lease_ms and 2 * total <= left then
    local text = string.format('%.0f|%.0f|%s|%s|%s', now, total, other_ms, other_asked, mine)
    notes[window][#notes[window] + 1], notes[window][#notes[window] + 2] = field, text
  end
  if 2 * (reserved + amount) <= left then -- and so is what the caller holds of it
    return false
  end
  local own, others = share_of(mine, index, scope)
  others = others or (tonumber(other_ms) > now - LATELY_MS and 2 * tonumber(other_asked) <= left)
  return others and 2 * (own + amount) > left
end
for i = first_scope, #ARGV, 3 do
  local first = (i - first_scope) / 3 * 5 + 1
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
      local is_full, is_over = amount > left - tonumber(reserved or '0'), false
      if caller and amount > 0 and amount <= left then
        local noted, held_in_all = known[window], tonumber(reserved or '0')
        -- Of a tenant's own budget all of its callers together have no share.
        is_over = string.sub(ARGV[i], 1, 7) ~= 'tenant:'
          and is_over_share(window, fields[first + 3], noted[first + 3], tenant, 2, ARGV[i], left, held_in_all)
        is_over = is_over_share(window, fields[first + 4], noted[first + 4], caller, 3, ARGV[i], left, held_in_all) or is_over
      end
      if is_full or is_over then
        local index, named = (i - first_scope) / 3 + 1, window == 1 and 'daily' or 'monthly'
        local refusal = {0, index, named, string.format('%.0f', limit), spent or '0', reserved or '0', is_full and 0 or 1}
        if amount > left then
          return refusal
        end
        kept_out = kept_out or refusal -- by calls in flight, which mostly cost less: a budget that is spent precedes it
      end
    end
  end
end
for window = 1, 2 do
  if #notes[window] > 0 and redis.call('HSET', periods[window], unpack(notes[window])) > 0 then
    redis.call('PEXPIREAT', periods[window], keep_until_ms[window])
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
if is_new then
  redis.call('HINCRBY', KEYS[5], tenants, 1)
end
local function hold(of, sum)
  if string.match(of, OWNER) and sum ~= 0 and redis.call('HINCRBY', held_key, of, string.format('%.0f', sum)) <= 0 then
    redis.call('HDEL', held_key, of)
  end
end
if owner_before and owner_before ~= owner then
  hold(owner_before, -tonumber(before))
  hold(owner, tonumber(worst_case))
else
  hold(owner, amount)
end
-- state 'r': reserved; 's': its worker charged what it cost; 'e': its lease ended and it was charged at the estimate.
redis.call('HSET', reservations, attempt_id, table.concat({'r', worst_case, at, day_name, month_name, owner}, '|'))
redis.call('ZADD', leases, now + lease_ms, attempt_id)
return {1, at}
