-- The scripts of budgets.
-- A reservation is '<state>|<amount>|<ms>|<day>|<month>|<owner>'. Its state is 'r': reserved; 's': its worker charged the
-- actual cost; 'e': its lease ended and it was charged at the estimate. Its owner is '<agent>\n<tenant>\n<caller>' where a cap
-- is hard, and '<agent>\n<tenant>' elsewhere.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function integer(number)
  return string.format('%.0f', number)
end
-- Adds to the share of an owner with a caller.
local function hold(held_key, owner, amount)
  if amount ~= 0 and string.find(owner, '\n.*\n') and redis.call('HINCRBY', held_key, owner, integer(amount)) <= 0 then
    redis.call('HDEL', held_key, owner)
  end
end
-- Ends what is reserved, and charges a cost in its place, in the counters KEYS[3] and KEYS[4], of day and month, and KEYS[5].
-- Counters that no longer exist were of a period that is long over; and '-0' is no integer to Redis.
local function charge(owner, amount, cost, first_scope)
  for k = 3, 4 do
    local is_counted = redis.call('EXISTS', KEYS[k]) == 1
    for i = first_scope, is_counted and #ARGV or 0 do
      if amount ~= '0' then
        redis.call('HINCRBY', KEYS[k], 'reserved:' .. ARGV[i], '-' .. amount)
      end
      if cost ~= '' and cost ~= '0' then
        redis.call('HINCRBY', KEYS[k], 'spent:' .. ARGV[i], cost)
      end
    end
  end
  hold(KEYS[5], owner, -tonumber(amount))
end

--- reserve
-- Reserves the worst case of a call from all its budgets, or from none. Asking again reserves it once, and renews the lease.
-- While others hold some of a hard cap or wait for it, a caller, and so a tenant, holds at most half of the unspent rest.
-- KEYS: reservations, leases, filled, day, month, held
-- ARGV from the 17th, for each scope: key, hard limit of the day, of the month ('' = none)
-- Returns {1, when it was reserved} or {0, index of the refusing scope from 1, 'daily' or 'monthly', limit, spent, reserved,
-- 1 where it is the share that has no room}, {2, now} where that is in another day or month, {3} where the counters are lost
-- and a cap could not be held, {4} where the sender has named too many tenants in the month.
local attempt_id, worst_case, asked_at = ARGV[1], ARGV[2], ARGV[4] -- asked_at '': now
local lease_ms = tonumber(ARGV[3]) -- '': only looks, and reserves nothing
local day_name, month_name = ARGV[5], ARGV[6]
local day_start, day_end, month_start, month_end = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local keep_until_ms, owner, first_scope = {ARGV[11], ARGV[12]}, ARGV[13], 17 -- of the day and of the month
local most_tenants, sender = ARGV[14], ARGV[15] -- most_tenants '': none, or one that is known to exist
local waits_ms = tonumber(ARGV[16]) -- a call that is kept out asks again before that, or waits no more
local reservations, leases, filled_key, periods, held_key = KEYS[1], KEYS[2], KEYS[3], {KEYS[4], KEYS[5]}, KEYS[6]
local now = now_ms()
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
-- New counters of the month are made for so many tenants of one sender, who may name any.
local tenants = 'tenants:' .. sender
local is_new = most_tenants ~= '' and lease_ms and redis.call('HEXISTS', KEYS[5], 'reserved:' .. ARGV[#ARGV - 2]) == 0
if is_new and tonumber(redis.call('HGET', KEYS[5], tenants) or '0') >= tonumber(most_tenants) then
  return {4}
end
-- Reserved with another amount, for another model, by a worker that lost the job: the difference is what is asked for.
local amount, filled = tonumber(worst_case) - tonumber(before or '0'), false
local fields, known, kept_out = {}, {}, nil
for i = first_scope, #ARGV, 3 do
  for _, name in ipairs({'spent:', 'reserved:', 'cap:', 'tenant_waits:', 'caller_waits:'}) do
    fields[#fields + 1] = name .. ARGV[i]
  end
end
local OWNER = '^(.-)\n(.-)\n(.*)$'
local _, tenant, caller = string.match(owner, OWNER)
local holders
-- The holding of a tenant (index 2) or a caller (3) in a scope, and true where others hold some, too. All holdings are read
-- at most once: there are as many as callers with a call under way.
local function share_of(mine, index, scope)
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
-- The calls that wait are noted for each budget that keeps them out: the latest, and the latest of another caller, as
-- '<until ms>|<amount>|<until ms>|<amount>|<name of the latest>'.
local NOTE = '^(%d+)|(%d+)|(%d+)|(%d+)|(.*)$'
local notes = {{}, {}} -- of this call, in the day and in the month
local total = tonumber(worst_case)
local function note_waiting(window, field, note, mine)
  local until_ms, waiting, other_until_ms, other_waiting, name = string.match(note or '', NOTE)
  if name ~= mine then
    other_until_ms, other_waiting = until_ms or '0', waiting or '0'
  end
  local text = string.format('%.0f|%.0f|%s|%s|%s', now + waits_ms, total, other_until_ms, other_waiting, mine)
  notes[window][#notes[window] + 1], notes[window][#notes[window] + 2] = field, text
end
-- True if a tenant or a caller asks for more than its share of the rest, which it has while another holds some of it or waits.
-- One that waits for more than a share has none itself: two of them would keep each other out for ever.
local function is_over_share(note, mine, index, scope, left, reserved)
  if 2 * (reserved + amount) <= left then -- and so is the caller's part of it
    return false
  end
  local own, others = share_of(mine, index, scope)
  if not others then
    local until_ms, waiting, other_until_ms, other_waiting, name = string.match(note or '', NOTE)
    if name == mine then
      until_ms, waiting = other_until_ms, other_waiting
    end
    others = until_ms and tonumber(until_ms) > now and 2 * tonumber(waiting) <= left
  end
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
      local shares = {} -- of a tenant's own budget all of its callers together have none
      if caller and amount > 0 and amount <= left then
        shares[1] = string.sub(ARGV[i], 1, 7) ~= 'tenant:' and {first + 3, tenant, 2} or nil
        shares[#shares + 1] = {first + 4, caller, 3}
      end
      for _, share in ipairs(shares) do
        local note, mine, index = known[window][share[1]], share[2], share[3]
        is_over = is_over or is_over_share(note, mine, index, ARGV[i], left, tonumber(reserved or '0'))
      end
      if (is_full or is_over) and lease_ms and 2 * total <= left then
        for _, share in ipairs(shares) do
          note_waiting(window, fields[share[1]], known[window][share[1]], share[2])
        end
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
if owner_before and owner_before ~= owner then
  hold(held_key, owner_before, -tonumber(before))
  hold(held_key, owner, tonumber(worst_case))
else
  hold(held_key, owner, amount)
end
redis.call('HSET', reservations, attempt_id, table.concat({'r', worst_case, at, day_name, month_name, owner}, '|'))
redis.call('ZADD', leases, now + lease_ms, attempt_id)
return {1, at}

--- release
-- Ends a reservation: releases it where its call was never made, or charges the cost of the call in its place until the
-- attempt's event settles it.
-- KEYS: reservations, leases, day, month, held   ARGV from the 5th: scope keys
-- Returns 1, or 0 where nothing is reserved, in these periods.
local attempt_id, day_name, month_name, first_scope = ARGV[1], ARGV[2], ARGV[3], 5
local cost = ARGV[4] -- nano-dollars; '': the call was never made
local reservations, leases = KEYS[1], KEYS[2]
local held = redis.call('HGET', reservations, attempt_id)
if not held then
  return 0
end
local state, amount, rest, day, month, owner = string.match(held, '^(%a)|(%d+)(|%d+|([^|]+)|([^|]+)|(.*))$')
if state ~= 'r' or day ~= day_name or month ~= month_name then
  return 0
end
charge(owner, amount, cost, first_scope)
if cost == '' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
else
  redis.call('HSET', reservations, attempt_id, 's|' .. cost .. rest)
end
return 1

--- settle
-- Replaces reservations by the costs of the calls, each once for each event of the log, which has a bit in a block. Counters are
-- added to once for all settlements of a batch; what is answered is as if one came after the other.
-- KEYS: reservations, leases, filled, held, applied blocks..., periods...
-- ARGV from the 6th, for each period: name, keep until (ms); then for each settlement: attempt, sequence, index of the block's
-- key, bit, indices of the keys of day and month, number of figures, their names and values, number of scopes, their keys
-- Returns for each {counted (1) or seen before (0), spent and raised cap ('' = none) of each scope in the day, then in the
-- month}, {2, day, month} where it is reserved in other periods; {3} alone where the counters are not those of this log.
local log, zone, block_keep_ms, settlements = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local reservations, leases, filled_key, held_key, first_period = KEYS[1], KEYS[2], KEYS[3], KEYS[4], 5 + tonumber(ARGV[5])
local EXACT = 2 ^ 53
local filled = redis.call('HMGET', filled_key, 'log', 'zone', 'upto')
if filled[1] ~= log or filled[2] ~= zone then
  return {3}
end
local now, at = now_ms(), 6
local function take()
  at = at + 1
  return ARGV[at - 1]
end

local periods = {}
for k = first_period, #KEYS do
  local name, keep_until_ms = take(), take()
  -- Periods that are long over are not counted any more.
  periods[k] = {
    key = KEYS[k], name = name, keep_until_ms = keep_until_ms, over = tonumber(keep_until_ms) <= now,
    sums = {}, spent = {}, cap = {}, fields = {},
  }
end
local batch, attempts = {}, {}
for i = 1, settlements do
  local one = {
    attempt = take(), sequence = tonumber(take()), block = KEYS[tonumber(take())], bit = take(),
    day = periods[tonumber(take())], month = periods[tonumber(take())], figures = {}, scopes = {},
  }
  for f = 1, tonumber(take()) do
    one.figures[f] = {name = take(), value = tonumber(take())}
  end
  for s = 1, tonumber(take()) do
    local scope = take()
    one.scopes[s] = scope
    for _, period in ipairs({one.day, one.month}) do
      if not period.spent[scope] then
        period.spent[scope] = 0
        period.fields[#period.fields + 1] = scope
      end
    end
  end
  batch[i], attempts[i] = one, one.attempt
end
for _, period in pairs(periods) do
  local asked = {}
  for i, scope in ipairs(period.fields) do
    asked[2 * i - 1], asked[2 * i] = 'spent:' .. scope, 'cap:' .. scope
  end
  local known = redis.call('HMGET', period.key, unpack(asked))
  for i, scope in ipairs(period.fields) do
    period.spent[scope], period.cap[scope] = tonumber(known[2 * i - 1] or '0'), known[2 * i] or ''
  end
end
local held = {}
for i, text in ipairs(redis.call('HMGET', reservations, unpack(attempts))) do
  held[attempts[i]] = text
end

local function add(one, name, amount)
  for _, period in ipairs({one.day, one.month}) do
    for _, scope in ipairs(period.over and {} or one.scopes) do
      local field = name .. ':' .. scope
      local sum = period.sums[field] or 0
      if math.abs(sum + amount) >= EXACT then -- a double may not hold it
        redis.call('HINCRBY', period.key, field, integer(sum))
        sum = 0
      end
      period.sums[field] = sum + amount
      if name == 'spent' then
        period.spent[scope] = period.spent[scope] + amount
      end
    end
  end
end
local answers, settled, blocks = {}, {}, {}
for i, one in ipairs(batch) do
  local pattern = '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|(.*)$'
  local state, amount, day, month, owner = string.match(held[one.attempt] or '', pattern)
  if state and (day ~= one.day.name or month ~= one.month.name) then
    answers[i] = {2, day, month}
  else
    if state then
      add(one, state == 'r' and 'reserved' or 'spent', -tonumber(amount))
      if state == 'r' then
        hold(held_key, owner, -tonumber(amount))
      end
      held[one.attempt] = nil
      settled[#settled + 1] = one.attempt
    end
    local counted = one.sequence > tonumber(filled[3]) and 1 - redis.call('SETBIT', one.block, one.bit, 1) or 0
    if counted == 1 then
      blocks[one.block] = true
      for _, figure in ipairs(one.figures) do
        add(one, figure.name, figure.value)
      end
    end
    local answer = {counted}
    for _, period in ipairs({one.day, one.month}) do
      for _, scope in ipairs(one.scopes) do
        answer[#answer + 1] = integer(period.spent[scope])
        answer[#answer + 1] = period.cap[scope]
      end
    end
    answers[i] = answer
  end
end

if #settled > 0 then
  redis.call('HDEL', reservations, unpack(settled))
  redis.call('ZREM', leases, unpack(settled))
end
for block in pairs(blocks) do
  redis.call('PEXPIRE', block, block_keep_ms)
end
for _, period in pairs(periods) do
  for field, sum in pairs(period.sums) do
    if sum ~= 0 then
      redis.call('HINCRBY', period.key, field, integer(sum))
    end
  end
  redis.call('PEXPIREAT', period.key, period.keep_until_ms)
end
return answers

--- lapse
-- Charges a reservation at its estimate when its lease has ended and no event has reported the actual cost. The event may
-- still come: settling it then corrects the charge. Called again long after, it forgets the reservation, which stays charged.
-- Until the lease has ended by Redis' clock nothing happens: another caller has charged it, or it was reserved again.
-- KEYS: reservations, leases, day, month, held   ARGV from the 3rd: scope keys
local attempt_id, forget_at_ms, first_scope = ARGV[1], ARGV[2], 3
local reservations, leases = KEYS[1], KEYS[2]
local ends = redis.call('ZSCORE', leases, attempt_id)
if ends and tonumber(ends) > now_ms() then
  return 0
end
local held = redis.call('HGET', reservations, attempt_id)
local state, amount, owner = string.match(held or '', '^(%a)|(%d+)|%d+|[^|]+|[^|]+|(.*)$')
if state == 's' then -- its worker has charged the actual cost, and died before it could record that
  redis.call('HSET', reservations, attempt_id, 'e' .. string.sub(held, 2))
  redis.call('ZADD', leases, forget_at_ms, attempt_id)
  return 0
end
if state ~= 'r' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
  return 0
end
charge(owner, amount, amount, first_scope)
redis.call('HSET', reservations, attempt_id, 'e' .. string.sub(held, 2))
redis.call('ZADD', leases, forget_at_ms, attempt_id)
return 1

--- snapshot
-- Copies the counters as of one moment, to be read in parts after it.
-- KEYS: filled, applied blocks..., then hashes to be copied, each with the key of its copy
-- Returns {fields of filled, number of copies, blocks in hexadecimal...}.
local blocks, keep_ms, copies = tonumber(ARGV[1]), ARGV[2], 0
for k = 2 + blocks, #KEYS, 2 do
  copies = copies + redis.call('COPY', KEYS[k], KEYS[k + 1], 'REPLACE')
  redis.call('PEXPIRE', KEYS[k + 1], keep_ms)
end
local hex = {}
for byte = 0, 255 do
  hex[string.char(byte)] = string.format('%02x', byte)
end
local answer = {redis.call('HMGET', KEYS[1], 'log', 'zone', 'upto', 'alone', 'repairs'), copies}
for k = 2, 1 + blocks do
  answer[k + 1] = string.gsub(redis.call('GET', KEYS[k]) or '', '.', hex)
end
return answer

--- fill
-- Sets all counters to the figures of the event log, once: the second caller changes nothing. Reservations of calls under
-- way are kept.
-- KEYS: filled, reservations, held, periods...
-- ARGV from the 7th, for each period: name, keep until (ms), number of fields, then fields and values
-- Returns 1, or 0 where the counters are not filled as the caller believed.
local log, zone, upto, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4] -- alone 1: nothing in it is from another log
local log_before, zone_before = ARGV[5], ARGV[6] -- what they are filled from now; '': they are not filled
local filled, reservations_key, held_key, first_period, first_argument = KEYS[1], KEYS[2], KEYS[3], 4, 7
local known = redis.call('HMGET', filled, 'log', 'zone')
if (known[1] or '') ~= log_before or (known[2] or '') ~= zone_before then
  return 0
end
local period_keys, keep_until, at = {}, {}, first_argument
for k = first_period, #KEYS do
  local name, until_ms, fields, first = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), at + 3
  period_keys[name], keep_until[KEYS[k]] = KEYS[k], until_ms
  redis.call('UNLINK', KEYS[k])
  at = first + 2 * fields
  for i = first, at - 2, 2 do
    redis.call('HSET', KEYS[k], ARGV[i], ARGV[i + 1])
  end
end
redis.call('UNLINK', held_key)
local cursor, seen = '0', {}
repeat
  local found = redis.call('HSCAN', reservations_key, cursor, 'COUNT', 1000)
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local attempt, text = found[2][i], found[2][i + 1]
    local state, amount, day, month, owner, agent, tenant =
      string.match(text, '^(%a)|(%d+)|%d+|([^|]+)|([^|]+)|((.-)\n([^\n]*).*)$')
    if state and not seen[attempt] then
      seen[attempt] = true
      if state == 'r' then
        hold(held_key, owner, tonumber(amount))
      end
      for _, period in ipairs({day, month}) do
        for _, key in ipairs({'global', 'agent:' .. agent, tenant ~= '' and 'tenant:' .. tenant or nil}) do
          if period_keys[period] then
            redis.call('HINCRBY', period_keys[period], (state == 'r' and 'reserved:' or 'spent:') .. key, amount)
          end
        end
      end
    end
  end
until cursor == '0'
for key, until_ms in pairs(keep_until) do
  redis.call('PEXPIREAT', key, until_ms)
end
redis.call('DEL', filled)
-- A new number with each filling: a repair that was computed before it is refused after it.
local time = redis.call('TIME')
local number = string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('HSET', filled, 'log', log, 'zone', zone, 'upto', upto, 'alone', alone, 'repairs', number)
return 1

--- repair
-- Adds missing amounts to counters, unless they were filled or repaired since they were read.
-- KEYS: filled, periods...
-- ARGV from the 5th, four for each addition: index of the period from 1, keep until (ms), field, amount to add
-- Returns 1, or 0 where they were.
local log, zone, repairs, first_addition = ARGV[1], ARGV[2], ARGV[3], 5
local upto = ARGV[4] -- the last event that is counted now
local filled = KEYS[1]
local known = redis.call('HMGET', filled, 'log', 'zone', 'repairs', 'upto')
if known[1] ~= log or known[2] ~= zone or known[3] ~= repairs then
  return 0
end
for i = first_addition, #ARGV, 4 do
  local period, keep_until_ms, field, amount = KEYS[1 + tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  redis.call('HINCRBY', period, field, amount)
  redis.call('PEXPIREAT', period, keep_until_ms)
end
if tonumber(upto) > tonumber(known[4]) then
  redis.call('HSET', filled, 'upto', upto)
end
redis.call('HINCRBY', filled, 'repairs', 1)
return 1
