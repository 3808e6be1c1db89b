-- The scripts of budgets.
-- A place is a scope in a period. A reservation says where it holds, so that whoever ends it needs to know nothing else:
--   <state>|<nano-dollars>|<ms>
--   <agent>
--   <tenant>
--   <caller>
--   <period>\t<scope>\t<flags>      one line for each place
-- Its state is 'r': reserved; 's': its worker charged what the call cost; 'e': its lease ended and it was charged as
-- reserved. The flags of a place are 'h' where it counts for the shares in this scope, and none elsewhere.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local texts = {} -- one script writes the same few numbers again and again
local function integer(number)
  local text = texts[number]
  if not text then
    text = string.format('%.0f', number)
    texts[number] = text
  end
  return text
end
local function add(key, field, amount)
  if amount ~= 0 then
    redis.call('HINCRBY', key, field, integer(amount))
  end
end
local function parse(text)
  local state, amount, ms, agent, tenant, caller, lines =
    string.match(text or '', '^(%a)|(%d+)|(%d+)\n([^\n]*)\n([^\n]*)\n([^\n]*)(.*)$')
  if not state then
    return nil
  end
  local held = {
    state = state, amount = tonumber(amount), ms = ms, agent = agent, tenant = tenant, caller = caller, places = {},
    lines = lines,
  }
  for period, scope, flags in string.gmatch(lines, '\n([^\t]*)\t([^\t]*)\t(%a*)') do
    held.places[#held.places + 1] = {period = period, scope = scope, flags = flags}
  end
  return held
end
local function text_of(held, state, amount)
  local header = table.concat({state, integer(amount), held.ms}, '|')
  return table.concat({header, held.agent, held.tenant, held.caller}, '\n') .. held.lines
end
-- Calls `each(period, field)` for the counters that a reservation adds to in a state.
local function for_each(held, state, each)
  local name = state == 'r' and 'reserved:' or 'spent:'
  for _, place in ipairs(held.places) do
    each(place.period, name .. place.scope)
  end
end
-- Adds to what the caller of a reservation holds in each scope that has shares.
local function share(held_key, held, amount)
  for _, place in ipairs(amount ~= 0 and held.places or {}) do
    if place.flags == 'h' then
      local field = table.concat({place.scope, held.tenant, held.caller}, '\n')
      if redis.call('HINCRBY', held_key, field, integer(amount)) <= 0 then
        redis.call('HDEL', held_key, field)
      end
    end
  end
end
-- Charges what is reserved in its place, or ends it where `amount` is nil. Counters that no longer exist were of a period
-- that is long over. `keys` are those of the periods by name.
local function charge(held, keys, held_key, amount)
  local counted = {}
  local function count(value)
    return function(period, field)
      local key = keys[period]
      if counted[key] == nil then
        counted[key] = redis.call('EXISTS', key) == 1
      end
      if counted[key] then
        add(key, field, value)
      end
    end
  end
  for_each(held, 'r', count(-held.amount))
  if amount then
    for_each(held, 's', count(amount))
  end
  share(held_key, held, -held.amount)
end
local function has_all(held, keys)
  for _, place in ipairs(held.places) do
    if not keys[place.period] then
      return false
    end
  end
  return true
end

--- reserve
-- Reserves the worst case of a call in all places where it counts, or in none. Asking again reserves it once, and renews the
-- lease. While others hold some of a hard cap or wait for it, a caller, and so a tenant, holds at most half of the unspent
-- rest.
-- KEYS: reservations, leases, filled, held, periods...
-- ARGV from the 13th, for each period: name, first ms, first ms after it, keep until (ms);
-- then for each place: number of its period, scope, flags, hard limit ('' = none).
-- Flags beyond that above: 'n': the caller made its name up, perhaps; 'x' and 'y': tenants and callers have shares.
-- Returns {1, when it was reserved} or {0, number of the refusing place, limit, spent, reserved, 1 where it is the share that
-- has no room}, {2, now} where that is in another period, {3} where the counters are lost and a cap could not be held, {4}
-- where the sender has made up too many names in the period, {5, dimensions} where others are counted.
local attempt_id, worst_case, asked_at = ARGV[1], tonumber(ARGV[2]), ARGV[4] -- asked_at '': now
local lease_ms = tonumber(ARGV[3]) -- '': only looks, and reserves nothing
local agent, tenant, caller = ARGV[5], ARGV[6], ARGV[7]
local most_names, sender = ARGV[8], ARGV[9]
local waits_ms = tonumber(ARGV[10]) -- a call that is kept out asks again before that, or waits no more
local dimensions = ARGV[11] -- those that the places are of
local is_incomplete = ARGV[12] == '1' -- a hard cap applies in a dimension that is not counted yet, or not wholly
local reservations, leases, filled_key, held_key, first_period, first_argument = KEYS[1], KEYS[2], KEYS[3], KEYS[4], 5, 13
local now = now_ms()
local periods, keys = {}, {}
local at_argument = first_argument
for k = first_period, #KEYS do
  local name = ARGV[at_argument]
  periods[#periods + 1] = {
    key = KEYS[k], name = name, first = tonumber(ARGV[at_argument + 1]), over = tonumber(ARGV[at_argument + 2]),
    keep_until_ms = ARGV[at_argument + 3], fields = {}, notes = {},
  }
  keys[name] = KEYS[k]
  at_argument = at_argument + 4
end
local before = parse(redis.call('HGET', reservations, attempt_id))
local call = {agent = agent, tenant = tenant, caller = caller, places = {}}
local places, lines = {}, {}
for i = at_argument, #ARGV, 4 do
  local period = periods[tonumber(ARGV[i])]
  local scope, flags = ARGV[i + 1], ARGV[i + 2]
  local stored_flags = string.find(flags, 'h', 1, true) and 'h' or ''
  places[#places + 1] = {period = period, scope = scope, flags = flags, cap = ARGV[i + 3]}
  lines[#lines + 1] = '\n' .. period.name .. '\t' .. scope .. '\t' .. stored_flags
  call.places[#call.places + 1] = {period = period.name, scope = scope, flags = stored_flags}
end
call.lines = table.concat(lines)
if before then
  local is_asked = {}
  for _, place in ipairs(call.places) do
    is_asked[place.period .. '\t' .. place.scope] = true
  end
  -- It may lack a place in a dimension that is counted since.
  local is_same = before.amount == worst_case
  for _, place in ipairs(before.places) do
    is_same = is_same and is_asked[place.period .. '\t' .. place.scope]
  end
  if before.state ~= 'r' or is_same or not has_all(before, keys) then
    if before.state == 'r' and lease_ms then
      redis.call('ZADD', leases, 'GT', now + lease_ms, attempt_id)
    end
    return {1, before.ms}
  end
end
local source = redis.call('HMGET', filled_key, 'log', 'dimensions')
-- A reservation that Redis had lost is of the dimensions that were counted then.
if source[1] and asked_at == '' and (source[2] or '') ~= dimensions then
  return {5, source[2] or ''}
end
if is_incomplete then
  return {3}
end
local at = tonumber(before and before.ms or asked_at) or now
for _, period in ipairs(periods) do
  if at < period.first or at >= period.over then
    return {2, now}
  end
end
-- New counters are made for so many names of one sender in a period, who may make up any.
local names = 'names:' .. sender
local added = {}
for _, place in ipairs(lease_ms and most_names ~= '' and places or {}) do
  local key = place.period.key
  if string.find(place.flags, 'n', 1, true) and redis.call('HEXISTS', key, 'reserved:' .. place.scope) == 0 then
    added[key] = (added[key] or tonumber(redis.call('HGET', key, names) or '0')) + 1
    if added[key] > tonumber(most_names) then
      return {4}
    end
  end
end
-- Reserved otherwise, for another model, by a worker that lost the job: what it holds already is not asked for again.
local holds = {}
if before then
  for_each(before, 'r', function(period, field)
    holds[keys[period] .. '\n' .. field] = before.amount
  end)
end
local function more(place)
  return worst_case - (before and holds[place.period.key .. '\nreserved:' .. place.scope] or 0)
end
local kept_out
for _, place in ipairs(places) do
  if place.cap ~= '' then
    if not source[1] then
      return {3}
    end
    local fields = place.period.fields
    local n = #fields
    place.first_value = n + 1
    fields[n + 1], fields[n + 2], fields[n + 3] = 'spent:' .. place.scope, 'reserved:' .. place.scope, 'cap:' .. place.scope
    fields[n + 4], fields[n + 5] = 'tenant_waits:' .. place.scope, 'caller_waits:' .. place.scope
  end
end
for _, period in ipairs(periods) do
  period.values = #period.fields > 0 and redis.call('HMGET', period.key, unpack(period.fields)) or {}
end
-- The holding of a tenant (index 2) or a caller (3) in a scope, and true where others hold some, too. All holdings are read
-- at most once: there are as many as callers with a call under way.
local holders
local function share_of(mine, index, scope)
  if not holders then
    holders = {}
    local flat = redis.call('HGETALL', held_key)
    for i = 1, #flat, 2 do
      local holder = {string.match(flat[i], '^(.-)\n(.-)\n(.*)$')}
      holder[4] = tonumber(flat[i + 1])
      holders[#holders + 1] = holder
    end
  end
  local own, others = 0, false
  for _, holder in ipairs(holders) do
    if holder[1] == scope then
      if holder[index] == mine then
        own = own + holder[4]
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
local function note_waiting(period, field, note, mine)
  local until_ms, waiting, other_until_ms, other_waiting, name = string.match(note or '', NOTE)
  if name ~= mine then
    other_until_ms, other_waiting = until_ms or '0', waiting or '0'
  end
  local text = string.format('%.0f|%.0f|%s|%s|%s', now + waits_ms, worst_case, other_until_ms, other_waiting, mine)
  period.notes[#period.notes + 1], period.notes[#period.notes + 2] = field, text
end
-- True if a tenant or a caller asks for more than its share of the rest, which it has while another holds some of it or waits.
-- One that waits for more than a share has none itself: two of them would keep each other out for ever.
local function is_over_share(note, mine, index, scope, left, reserved, amount)
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
for p, place in ipairs(places) do
  local period, first = place.period, place.first_value
  if first then
    local limit, amount = tonumber(place.cap), more(place)
    local spent, reserved, raised_note = period.values[first], period.values[first + 1], period.values[first + 2]
    local raised, over = string.match(raised_note or '', '^(%d+):(%d+)$') -- by a person, over a cap that may have changed
    if over == place.cap then
      limit = math.max(limit, tonumber(raised))
    end
    local left = limit - tonumber(spent or '0') -- added up, a double might not hold them
    local is_full, is_over = amount > left - tonumber(reserved or '0'), false
    local shares = {}
    if amount > 0 and amount <= left then
      shares[1] = string.find(place.flags, 'x', 1, true) and {first + 3, tenant, 2} or nil
      shares[#shares + 1] = string.find(place.flags, 'y', 1, true) and {first + 4, caller, 3} or nil
    end
    for _, one in ipairs(shares) do
      local note, mine, index = period.values[one[1]], one[2], one[3]
      is_over = is_over or is_over_share(note, mine, index, place.scope, left, tonumber(reserved or '0'), amount)
    end
    if (is_full or is_over) and lease_ms and 2 * worst_case <= left then
      for _, one in ipairs(shares) do
        note_waiting(period, period.fields[one[1]], period.values[one[1]], one[2])
      end
    end
    if is_full or is_over then
      local refusal = {0, p, integer(limit), spent or '0', reserved or '0', is_full and 0 or 1}
      if amount > left then
        return refusal
      end
      kept_out = kept_out or refusal -- by calls in flight, which mostly cost less: a budget that is spent precedes it
    end
  end
end
for _, period in ipairs(periods) do
  if #period.notes > 0 and redis.call('HSET', period.key, unpack(period.notes)) > 0 then
    redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  end
end
if kept_out then
  return kept_out
end
call.ms = integer(at)
if not lease_ms then
  return {1, call.ms}
end
for key, count in pairs(added) do
  redis.call('HSET', key, names, count)
end
if before then
  for_each(before, 'r', function(period, field)
    add(keys[period], field, -before.amount)
  end)
  share(held_key, before, -before.amount)
end
local is_fresh = {}
for_each(call, 'r', function(period, field)
  local reserved = redis.call('HINCRBY', keys[period], field, integer(worst_case))
  is_fresh[period] = is_fresh[period] or reserved == worst_case -- nothing else is reserved, and maybe nothing was counted yet
end)
for _, period in ipairs(periods) do
  if is_fresh[period.name] then
    redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  end
end
share(held_key, call, worst_case)
redis.call('HSET', reservations, attempt_id, text_of(call, 'r', worst_case))
redis.call('ZADD', leases, now + lease_ms, attempt_id)
return {1, call.ms}

--- release
-- Ends a reservation: releases it where its call was never made, or charges the cost of the call in its place until the
-- attempt's event settles it.
-- KEYS: reservations, leases, held, periods...   ARGV from the 3rd: names of the periods
-- Returns 1, or 0 where nothing is reserved, in these periods.
local attempt_id, first_period, first_argument = ARGV[1], 4, 3
local cost = tonumber(ARGV[2]) -- nano-dollars; '': the call was never made
local reservations, leases, held_key = KEYS[1], KEYS[2], KEYS[3]
local keys = {}
for k = first_period, #KEYS do
  keys[ARGV[first_argument + k - first_period]] = KEYS[k]
end
local held = parse(redis.call('HGET', reservations, attempt_id))
if not held or held.state ~= 'r' or not has_all(held, keys) then
  return 0
end
charge(held, keys, held_key, cost)
if cost then
  redis.call('HSET', reservations, attempt_id, text_of(held, 's', cost))
else
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
end
return 1

--- settle
-- Replaces reservations by the costs of the calls, each once for each event of the log, which has a bit in a block. Counters
-- are added to once for all settlements of a batch.
-- KEYS: reservations, leases, filled, held, applied blocks..., periods...
-- ARGV from the 8th, for each period: name, keep until (ms); for each place: number of its period, scope; then for each
-- settlement: attempt, sequence, index of the block's key, bit, number of figures, their names and values, number of places,
-- their numbers.
-- Returns {for each settlement 1 (counted), 0 (counted before) or the names of further periods that it is reserved in, which
-- is repeated with them; for each place its spend and its raised cap ('' = none)}; {3} where the counters are not those of
-- this log, {5, dimensions} where others are counted.
local log, zone, block_keep_ms, settlements = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local first_period, number_of_places = 5 + tonumber(ARGV[5]), tonumber(ARGV[6])
local reservations, leases, filled_key, held_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local EXACT = 2 ^ 53
local filled = redis.call('HMGET', filled_key, 'log', 'zone', 'upto', 'dimensions')
if filled[1] ~= log or filled[2] ~= zone then
  return {3}
end
if (filled[4] or '') ~= ARGV[7] then
  return {5, filled[4] or ''}
end
local now, argument = now_ms(), 8
local function take()
  argument = argument + 1
  return ARGV[argument - 1]
end

local periods, by_name = {}, {}
for k = first_period, #KEYS do
  local period = {key = KEYS[k], name = take(), keep_until_ms = take(), sums = {}, asked = {}}
  period.over = tonumber(period.keep_until_ms) <= now -- long over, and not counted any more
  periods[#periods + 1], by_name[period.name] = period, period
end
local places = {}
for p = 1, number_of_places do
  local period, scope = periods[tonumber(take())], take()
  places[p] = {period = period, scope = scope, at = #period.asked}
  period.asked[#period.asked + 1], period.asked[#period.asked + 2] = 'spent:' .. scope, 'cap:' .. scope
end
local batch, attempts = {}, {}
for i = 1, settlements do
  local settlement = {
    attempt = take(), sequence = tonumber(take()), block = KEYS[tonumber(take())], bit = take(), figures = {}, places = {},
  }
  for f = 1, tonumber(take()) do
    settlement.figures[f] = {name = take(), value = tonumber(take())}
  end
  for p = 1, tonumber(take()) do
    settlement.places[p] = places[tonumber(take())]
  end
  batch[i], attempts[i] = settlement, settlement.attempt
end
local held = {}
for i, text in ipairs(redis.call('HMGET', reservations, unpack(attempts))) do
  held[attempts[i]] = parse(text)
end

local function sum(period, field, amount)
  if period.over then
    return
  end
  local before = period.sums[field] or 0
  if math.abs(before + amount) >= EXACT then -- a double may not hold it
    redis.call('HINCRBY', period.key, field, integer(before))
    before = 0
  end
  period.sums[field] = before + amount
end
local answers, settled, blocks = {}, {}, {}
for i, settlement in ipairs(batch) do
  local reservation = held[settlement.attempt]
  if reservation and not has_all(reservation, by_name) then
    local names = {}
    for _, place in ipairs(reservation.places) do
      names[#names + 1] = place.period
    end
    answers[i] = table.concat(names, '\n')
  else
    if reservation then
      for_each(reservation, reservation.state, function(period, field)
        sum(by_name[period], field, -reservation.amount)
      end)
      if reservation.state == 'r' then
        share(held_key, reservation, -reservation.amount)
      end
      held[settlement.attempt] = nil
      settled[#settled + 1] = settlement.attempt
    end
    local counted = settlement.sequence > tonumber(filled[3]) and 1 - redis.call('SETBIT', settlement.block, settlement.bit, 1)
      or 0
    if counted == 1 then
      blocks[settlement.block] = true
      for _, figure in ipairs(settlement.figures) do
        for _, place in ipairs(settlement.places) do
          sum(place.period, figure.name .. ':' .. place.scope, figure.value)
        end
      end
    end
    answers[i] = counted
  end
end

if #settled > 0 then
  redis.call('HDEL', reservations, unpack(settled))
  redis.call('ZREM', leases, unpack(settled))
end
for block in pairs(blocks) do
  redis.call('PEXPIRE', block, block_keep_ms)
end
for _, period in ipairs(periods) do
  for field, amount in pairs(period.sums) do
    add(period.key, field, amount)
  end
  redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  period.values = #period.asked > 0 and redis.call('HMGET', period.key, unpack(period.asked)) or {}
end
local totals = {}
for _, place in ipairs(places) do
  totals[#totals + 1] = place.period.values[place.at + 1] or '0'
  totals[#totals + 1] = place.period.values[place.at + 2] or ''
end
return {answers, totals}

--- lapse
-- Charges a reservation as reserved when its lease has ended and no event has reported what the call cost. The event may
-- still come: settling it then corrects the charge. Called again long after, it forgets the reservation, which stays charged.
-- Until the lease has ended by Redis' clock nothing happens: another caller has charged it, or it was reserved again.
-- KEYS: reservations, leases, held, periods...   ARGV from the 3rd: names of the periods
local attempt_id, forget_at_ms, first_period, first_argument = ARGV[1], ARGV[2], 4, 3
local reservations, leases, held_key = KEYS[1], KEYS[2], KEYS[3]
local ends = redis.call('ZSCORE', leases, attempt_id)
if ends and tonumber(ends) > now_ms() then
  return 0
end
local keys = {}
for k = first_period, #KEYS do
  keys[ARGV[first_argument + k - first_period]] = KEYS[k]
end
local held = parse(redis.call('HGET', reservations, attempt_id))
if not held or held.state == 'e' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
  return 0
end
if not has_all(held, keys) then
  return 0
end
if held.state == 'r' then
  charge(held, keys, held_key, held.amount)
end
-- A worker that has charged the cost, and died before it could record that, has state 's'.
redis.call('HSET', reservations, attempt_id, text_of(held, 'e', held.amount))
redis.call('ZADD', leases, forget_at_ms, attempt_id)
return held.state == 'r' and 1 or 0

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
local answer = {redis.call('HMGET', KEYS[1], 'log', 'zone', 'upto', 'alone', 'repairs', 'dimensions'), copies}
for k = 2, 1 + blocks do
  answer[k + 1] = string.gsub(redis.call('GET', KEYS[k]) or '', '.', hex)
end
return answer

--- fill
-- Sets all counters to the figures of the event log, once: the second caller changes nothing. The figures were stored in
-- parts before, as nothing else runs in Redis meanwhile. Reservations of calls under way are kept.
-- KEYS: filled, reservations, held, then for each period: its counters, and the figures that they become
-- ARGV from the 8th, for each period: name, keep until (ms), number of fields
-- Returns 1, 0 where the counters are not filled as the caller believed, or 2 where the figures are not all there.
local log, zone, upto, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4] -- alone 1: nothing in it is from another log
local log_before, zone_before = ARGV[5], ARGV[6] -- what they are filled from now; '': they are not filled
local filled, reservations_key, held_key, first_period, argument = KEYS[1], KEYS[2], KEYS[3], 4, 8
local source = redis.call('HMGET', filled, 'log', 'zone')
if (source[1] or '') ~= log_before or (source[2] or '') ~= zone_before then
  return 0
end
local keys, keep_until = {}, {}
for k = first_period, #KEYS, 2 do
  if redis.call('HLEN', KEYS[k + 1]) ~= tonumber(ARGV[argument + 2]) then
    return 2
  end
  keys[ARGV[argument]], keep_until[KEYS[k]] = KEYS[k], ARGV[argument + 1]
  argument = argument + 3
end
for k = first_period, #KEYS, 2 do
  redis.call('UNLINK', KEYS[k])
  if redis.call('EXISTS', KEYS[k + 1]) == 1 then
    redis.call('RENAME', KEYS[k + 1], KEYS[k])
  end
end
redis.call('UNLINK', held_key)
local cursor, seen = '0', {}
repeat
  local page = redis.call('HSCAN', reservations_key, cursor, 'COUNT', 1000)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    local attempt, held = page[2][i], parse(page[2][i + 1])
    if held and not seen[attempt] then
      seen[attempt] = true
      for_each(held, held.state, function(period, field)
        if keys[period] then
          redis.call('HINCRBY', keys[period], field, integer(held.amount))
        end
      end)
      if held.state == 'r' then
        share(held_key, held, held.amount)
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
redis.call('HSET', filled, 'log', log, 'zone', zone, 'upto', upto, 'alone', alone, 'repairs', number, 'dimensions', ARGV[7])
return 1

--- repair
-- Adds missing amounts to counters, unless they were filled or repaired since they were read. The first part of a repair
-- says which events are counted by it: one that is settled between the parts must not be counted again.
-- KEYS: filled, periods...
-- ARGV from the 5th, four for each addition: index of the period from 1, keep until (ms), field, amount to add
-- Returns the number of the repair, which the next part has to name, or 0 where they were.
local log, zone, repairs, first_addition = ARGV[1], ARGV[2], ARGV[3], 5
local upto = ARGV[4] -- the last event that is counted now
local filled = KEYS[1]
local known = redis.call('HMGET', filled, 'log', 'zone', 'repairs', 'upto')
if known[1] ~= log or known[2] ~= zone or known[3] ~= repairs then
  return 0
end
local keep_until = {}
for i = first_addition, #ARGV, 4 do
  local period, field, amount = KEYS[1 + tonumber(ARGV[i])], ARGV[i + 2], ARGV[i + 3]
  redis.call('HINCRBY', period, field, amount)
  keep_until[period] = ARGV[i + 1]
end
for period, until_ms in pairs(keep_until) do
  redis.call('PEXPIREAT', period, until_ms)
end
if tonumber(upto) > tonumber(known[4]) then
  redis.call('HSET', filled, 'upto', upto)
end
return redis.call('HINCRBY', filled, 'repairs', 1)

--- count
-- Sets the dimensions that are counted, unless they have changed since they were read. Repairs computed before are refused.
-- KEYS: filled   ARGV: log, dimensions before, dimensions
-- Returns 1, or 0 where they have changed.
local known = redis.call('HMGET', KEYS[1], 'log', 'dimensions')
if known[1] ~= ARGV[1] or (known[2] or '') ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'dimensions', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'repairs', 1)
return 1
