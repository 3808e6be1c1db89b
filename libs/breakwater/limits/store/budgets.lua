-- The scripts of limits.
-- A call counts in places of three types. A counter is a scope in a period of the calendar. A window slides: it is a scope's
-- last minute, hour or day. Slots are a scope's calls at the same time.
-- A reservation says where it holds, so that whoever ends it needs to know nothing else:
--   <state>|<nano-dollars>|<tokens>|<ms>
--   <agent>
--   <tenant>
--   <caller>
--   c<key>\t<scope>\t<flags>...     the counters of a period: each scope with its flags
--   w<key>\t<slice>\t<flags>        a window
--   s<key>                          slots
-- Its state is 'r': reserved; 's': its worker charged what the call used; 'e': its lease ended and it was charged as
-- reserved. Charged, it has no windows and slots any more. The first flag of a counter is its unit: 'u' for nano-dollars, 't'
-- for tokens, 'r' for requests; an 'h' after it says that it counts for the shares in its scope. The flags of a window are
-- 'n' where it does not count input that was read from the provider's cache, 'm' where the sender of the job may have made up
-- its scope, and 'p' where its scope is a model or a provider. There, the tokens of a call that the provider refused by its own rate limit stay as reserved until they slide out
-- of the window: the provider has less room than was believed.
-- A window counts in slices of a hundredth of its length, in one hash: requests, tokens, nano-dollars and calls under way in
-- 'r<slice>', 't<slice>', 'u<slice>' and 'c<slice>', with the sums of all slices from 'first' to 'last' in 'r', 't', 'u' and
-- 'c'. A slice counts until a window after its end: a call never less than a window, and at most a slice more.
-- The windows of scopes that a sender may have made up are a sorted set by their ends.
-- Slots are a sorted set of attempts by the end of their leases.
-- Windows and slots are rates. Calls that wait for one stand in its queue, a sorted set of attempts by the virtual time at
-- which they would be through (`jobs.rules.turns`). A hash has what they wait with: 'a<attempt>' is
-- '<until ms>|<since ms>|<tokens>|<nano-dollars>\n<key>\n<tenant>', 'v' the virtual time, 'l<key>\n<tenant>' when the last call
-- of a caller would be through, 'w<key>\n<tenant>' the calls of a caller that wait, 'k<key>' the tenants of a key that do. One
-- that does not ask again in time leaves.
local SLICES = 100
-- What the fields of counters begin with, by their units.
local RESERVED = {u = 'reserved:', t = 'reserved_tokens:', r = 'reserved_calls:'}
local USED = {u = 'spent:', t = 'tokens:', r = 'calls:'}
local UNITS = {'r', 't', 'u', 'c'} -- of a window
local EXACT = 2 ^ 53 -- from there on, a double may not hold an integer
local texts = {} -- one script writes the same few numbers again and again
local function integer(number)
  local text = texts[number]
  if not text then
    text = string.format('%.0f', number)
    texts[number] = text
  end
  return text
end
-- Reads an integer, and remembers how it is written, which takes the longest.
local function read_integer(text)
  local value = tonumber(text)
  if value then
    texts[value] = text
  end
  return value
end
-- Adds amounts to fields of a hash that have these values, in one command rather than one for each field. Returns the sums.
local function add_to(key, fields, values, amounts)
  local sums, changes, n = {}, {}, 0
  for i = 1, #fields do
    local known = tonumber(values[i] or 0)
    local sum = known + amounts[i]
    if known < EXACT and sum < EXACT and known > -EXACT and sum > -EXACT then
      changes[n + 1], changes[n + 2], n = fields[i], sum, n + 2
    else
      sum = redis.call('HINCRBY', key, fields[i], integer(amounts[i]))
    end
    sums[i] = sum
  end
  if n > 0 then
    redis.call('HSET', key, unpack(changes))
  end
  return sums
end
local function add(key, fields, amounts)
  if #fields > 0 then
    add_to(key, fields, redis.call('HMGET', key, unpack(fields)), amounts)
  end
end
local function set_of_keys()
  local set = {}
  for _, key in ipairs(KEYS) do
    set[key] = true
  end
  return set
end
-- The places of a reservation by its lines: many reservations of a batch are in the same ones.
local parsed = {}
local function places_of(lines)
  local places = parsed[lines]
  if places then
    return places
  end
  places = {periods = {}, windows = {}, slots = {}}
  for kind, key, fields in string.gmatch(lines, '\n(%a)([^\t\n]*)([^\n]*)') do
    if kind == 'c' then
      local period, n = {key = key, scopes = {}, units = {}, shared = {}}, 0
      for scope, unit, flags in string.gmatch(fields, '\t([^\t]*)\t(%a)(%a*)') do
        n = n + 1
        period.scopes[n], period.units[n] = scope, unit
        if flags == 'h' then
          period.shared[#period.shared + 1] = scope
        end
      end
      places.periods[#places.periods + 1] = period
    elseif kind == 'w' then
      local slice, flags = string.match(fields, '^\t(%d+)\t(%a*)$')
      places.windows[#places.windows + 1] = {key = key, slice = slice, flags = flags}
    else
      places.slots[#places.slots + 1] = key
    end
  end
  parsed[lines] = places
  return places
end
local function parse(text)
  local state, amount, tokens, ms, agent, tenant, caller, lines =
    string.match(text or '', '^(%a)|(%d+)|(%d+)|(%d+)\n([^\n]*)\n([^\n]*)\n([^\n]*)(.*)$')
  if not state then
    return nil
  end
  local places = places_of(lines)
  return {
    state = state, amount = read_integer(amount), tokens = read_integer(tokens), ms = ms, agent = agent, tenant = tenant,
    caller = caller, periods = places.periods, windows = places.windows, slots = places.slots, lines = lines,
  }
end
local function header_of(held, state)
  local figures = table.concat({state, integer(held.amount), integer(held.tokens), held.ms}, '|')
  return table.concat({figures, held.agent, held.tenant, held.caller}, '\n')
end
-- The amounts of a reservation by their units.
local function amounts_of(held)
  return {u = held.amount, t = held.tokens, r = 1}
end
-- Calls `each(key, field, amount)` for the counters that reservations of some amounts add to in a state.
local function for_each(periods, state, amounts, each)
  local fields = state == 'r' and RESERVED or USED
  for _, period in ipairs(periods) do
    for i, unit in ipairs(period.units) do
      each(period.key, fields[unit] .. period.scopes[i], amounts[unit])
    end
  end
end
-- Adds to what the caller of a reservation holds in each scope that has shares. One that holds nothing has no field.
local function share(held_key, held, amount)
  local caller, ended = '\n' .. held.tenant .. '\n' .. held.caller, {}
  for _, period in ipairs(amount ~= 0 and held.periods or {}) do
    for _, scope in ipairs(period.shared) do
      local field = scope .. caller
      if redis.call('HINCRBY', held_key, field, integer(amount)) <= 0 then
        ended[#ended + 1] = field
      end
    end
  end
  if #ended > 0 then
    redis.call('HDEL', held_key, unpack(ended))
  end
end
-- The keys of a reservation's places that are not told, or nil.
local function further_keys(held, told)
  local keys
  local function note(key)
    if not told[key] then
      keys = keys or {}
      keys[#keys + 1] = key
    end
  end
  for _, period in ipairs(held.periods) do
    note(period.key)
  end
  for _, window in ipairs(held.windows) do
    note(window.key)
  end
  for _, key in ipairs(held.slots) do
    note(key)
  end
  return keys
end
-- Ends what a call holds in the windows and slots that are told: it is under way no more. `used` has what it used, of which
-- nil is unknown, so that the worst case stays; without `used`, the call was never made.
local function leave(held, told, attempt_id, used)
  for _, window in ipairs(held.windows) do
    if told[window.key] then
      local changes = {r = -1, t = -held.tokens, u = -held.amount, c = -1}
      if used then
        local is_unknown = not used.tokens or used.is_refused and string.find(window.flags, 'p', 1, true)
        local counts_cached = not string.find(window.flags, 'n', 1, true)
        local tokens = is_unknown and held.tokens or counts_cached and used.tokens or used.uncached
        changes = {r = 0, t = tokens - held.tokens, u = used.amount - held.amount, c = -1}
      end
      local fields, amounts = {}, {}
      for _, unit in ipairs(UNITS) do
        local n, amount = #fields, changes[unit]
        if amount ~= 0 then
          fields[n + 1], fields[n + 2], amounts[n + 1], amounts[n + 2] = unit, unit .. window.slice, amount, amount
        end
      end
      local values = redis.call('HMGET', window.key, 'r' .. window.slice, unpack(fields))
      if table.remove(values, 1) then -- else the slice is over, and has left the sums, or will with all that it holds
        add_to(window.key, fields, values, amounts)
      end
    end
  end
  for _, key in ipairs(held.slots) do
    if told[key] then
      redis.call('ZREM', key, attempt_id)
    end
  end
end
-- Charges what a call used in place of what is reserved in its counters, or ends that where `used` is nil. Counters that no
-- longer exist were of a period that is long over.
local function charge(held, held_key, used)
  local reserved, charged = amounts_of(held), nil
  share(held_key, held, -held.amount)
  if used then
    held.amount, held.tokens = used.amount, used.tokens or held.tokens
    charged = amounts_of(held)
  end
  for _, period in ipairs(held.periods) do
    local fields, amounts, n = {}, {}, 0
    for i, unit in ipairs(period.units) do
      local scope = period.scopes[i]
      if reserved[unit] ~= 0 then
        fields[n + 1], amounts[n + 1], n = RESERVED[unit] .. scope, -reserved[unit], n + 1
      end
      if charged and charged[unit] ~= 0 then
        fields[n + 1], amounts[n + 1], n = USED[unit] .. scope, charged[unit], n + 1
      end
    end
    local values = n > 0 and redis.call('HMGET', period.key, unpack(fields)) or {}
    if values[1] or (n > 0 and redis.call('EXISTS', period.key) == 1) then
      add_to(period.key, fields, values, amounts)
    end
  end
end
-- True if a version of the limits that the plane keeps, '<stream>/<sequence>', is older than another or of another stream.
local function is_older(version, other)
  local stream, sequence = string.match(version, '^(.*)/(%d+)$')
  local other_stream, other_sequence = string.match(other, '^(.*)/(%d+)$')
  return stream ~= other_stream or tonumber(sequence) < tonumber(other_sequence)
end
-- A reservation that is charged, as it is stored.
local function charged_text(held, state)
  local lines = #held.windows + #held.slots == 0 and held.lines or string.gsub(held.lines, '\n[ws][^\n]*', '')
  return header_of(held, state) .. lines
end

-- What counts in a window at a moment: its sums, and the slice that further calls count in. It forgets slices that are over.
local function sums_of(window, now)
  local key, slice = window.key, math.floor(now / window.slice_ms)
  local function fields_of(part)
    local fields = {}
    for i, unit in ipairs(UNITS) do
      fields[i] = unit .. part
    end
    return fields
  end
  local sums = {first = slice, last = slice, is_fresh = true, is_new = true, fields = fields_of(slice), of_slice = {}}
  local count, fields = #UNITS, {'first', 'last'}
  for i, unit in ipairs(UNITS) do
    fields[2 + i], fields[2 + count + i] = unit, sums.fields[i]
  end
  local known = redis.call('HMGET', key, unpack(fields))
  local over = slice - SLICES - 1
  local last = tonumber(known[2] or over)
  if last <= over or last > slice + SLICES then -- ahead by a window: the clock was set back, and the sums mean nothing
    if known[2] then
      redis.call('DEL', key)
    end
    for i, unit in ipairs(UNITS) do
      sums[unit], sums.of_slice[i] = 0, 0
    end
    return sums
  end
  for i, unit in ipairs(UNITS) do
    sums[unit], sums.of_slice[i] = tonumber(known[2 + i] or 0), known[2 + count + i] or 0
  end
  sums.first, sums.last, sums.is_fresh, sums.is_new = tonumber(known[1]), math.max(last, slice), last < slice, false
  if last > slice then -- another server's clock, which was a little ahead
    sums.fields = fields_of(last)
    for i, amount in ipairs(redis.call('HMGET', key, unpack(sums.fields))) do
      sums.of_slice[i] = amount or 0
    end
  end
  if sums.first <= over then
    local changes = {'first', over + 1}
    for _, unit in ipairs(UNITS) do
      local past = {}
      for old = sums.first, over do
        past[#past + 1] = unit .. old
      end
      for _, amount in ipairs(redis.call('HMGET', key, unpack(past))) do
        sums[unit] = sums[unit] - (amount or 0)
      end
      redis.call('HDEL', key, unpack(past))
      changes[#changes + 1], changes[#changes + 2] = unit, sums[unit]
    end
    sums.first = over + 1
    redis.call('HSET', key, unpack(changes))
  end
  return sums
end
-- The queues of rates
local function caller_of(key, waiting_tenant)
  return key .. '\n' .. waiting_tenant
end
-- Takes calls, with what they wait with by their attempts, out of a queue.
local function leave_queue(rate, attempts, texts)
  redis.call('ZREM', rate.queue, unpack(attempts))
  local fields, callers, keys = {}, {}, {}
  for i, text in ipairs(texts) do
    if text then
      fields[#fields + 1] = 'a' .. attempts[i]
      local caller = string.match(text, '\n(.*)$')
      callers[caller] = (callers[caller] or 0) + 1
    end
  end
  for caller, calls in pairs(callers) do
    if redis.call('HINCRBY', rate.waiters, 'w' .. caller, -calls) <= 0 then
      fields[#fields + 1], fields[#fields + 2] = 'w' .. caller, 'l' .. caller
      local key = string.match(caller, '^[^\n]*')
      keys[key] = (keys[key] or 0) + 1
    end
  end
  for key, tenants in pairs(keys) do
    if redis.call('HINCRBY', rate.waiters, 'k' .. key, -tenants) <= 0 then
      fields[#fields + 1] = 'k' .. key
    end
  end
  if #fields > 0 then
    redis.call('HDEL', rate.waiters, unpack(fields))
  end
  if redis.call('EXISTS', rate.queue) == 0 then
    redis.call('DEL', rate.waiters)
  end
end
-- Takes one call out of all queues that it waits in.
local function leave_queues(rates, attempt)
  for _, rate in ipairs(rates) do
    local text = redis.call('HGET', rate.waiters, 'a' .. attempt)
    if text or redis.call('ZSCORE', rate.queue, attempt) then
      leave_queue(rate, {attempt}, {text})
    end
  end
end

--- reserve
-- Reserves the worst case of a call in all places where it counts, or in none. Asking again reserves it once, and renews the
-- lease. While others hold some of a hard cap or wait for it, a caller, and so a tenant, holds at most half of the unspent
-- rest.
-- A call that waits for a rate has its place in the queue of the first one that has no room for it, in the order of the keys:
-- so no two calls wait for each other. There is room for it beside what counts and what stands before it in the queue.
-- KEYS: reservations, leases, filled, held, names, since when Redis has its data, periods..., windows..., slots..., the queues
-- of both..., what waits in each...
-- ARGV from the 18th, for each period: first ms, first ms after it, keep until (ms); then for each counter: scope, the
-- number of its period and its flags, hard limit ('' = none); then for each window: ms of a slice, flags, the units whose limits refuse
-- calls and have none wait, the most requests, tokens and nano-dollars ('' = none); then for each slots: the most calls
-- ('' = none), 'c' where that limit refuses calls; then the key and the tenant that wait, their share, and the ms for which the
-- call can wait ('' = for ever).
-- Flags of a counter or a window beyond those above: 'n' or 'm': the caller made its name up, perhaps; 'x' and 'y': tenants and callers have
-- shares.
-- Returns {1, when it was reserved, figures of the windows};
-- {0, number of the refusing counter, limit, used, reserved, 1 where it is the share that has no room};
-- {6, number of the refusing window, unit, ms until the call may fit (-1 = never), ms until it should ask again, calls that wait
-- before it, figures} or {7, number of the refusing slots, the same two times and number, figures}; the figures of each window
-- are the requests and the tokens that count, and the ms until none of them does;
-- {2, now} where that is in another period, {3} where the counters are lost and a cap could not be held, {4} where the sender
-- has made up too many names in the period, {5, dimensions} where others are counted, {8, version} where newer limits are in
-- force, or it is unknown which, {9, keys} where the attempt has a reservation of other amounts or in other places, for another
-- model perhaps: it is to be released first, with these keys of its places.
local attempt_id, lease_ms = ARGV[1], tonumber(ARGV[4]) -- no lease: only looks, and reserves nothing
local worst = {u = read_integer(ARGV[2]), t = read_integer(ARGV[3]), r = 1}
local asked_at = tonumber(ARGV[5]) -- of a reservation that Redis had lost; nil: now
local agent, tenant, caller = ARGV[6], ARGV[7], ARGV[8]
local most_names = tonumber(ARGV[9])
local waits_ms = tonumber(ARGV[10]) -- a call that is kept out asks again before that, or waits no more
local dimensions = ARGV[11] -- those that the counters are of
local is_incomplete = ARGV[12] == '1' -- a hard cap applies in a dimension that is not counted yet, or not wholly
local counter_lines = ARGV[13] -- of the reservation
local number_of_periods, number_of_counters, number_of_windows = tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])
local version = ARGV[17] -- of the limits that the plane keeps, as the caller knows them; '': the plane keeps none
local reservations, leases, filled_key, held_key, names_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now = now_ms()
local periods, counters, argument = {}, {}, 18
for k = 7, 6 + number_of_periods do
  periods[#periods + 1] = {
    key = KEYS[k], first = tonumber(ARGV[argument]), over = tonumber(ARGV[argument + 1]), keep_until_ms = ARGV[argument + 2],
    fields = {nil, nil, nil, nil}, changes = {nil, nil, nil, nil}, notes = {},
  }
  argument = argument + 3
end
for i = 1, number_of_counters do
  local scope, flags = ARGV[argument], ARGV[argument + 1]
  local unit = string.sub(flags, 2, 2)
  counters[i] = {
    period = periods[string.byte(flags) - 48], scope = scope, unit = unit, flags = flags, cap = ARGV[argument + 2],
    field = RESERVED[unit] .. scope,
  }
  argument = argument + 3
end
local windows, slots = {}, {}
for k = 7 + number_of_periods, 6 + number_of_periods + number_of_windows do
  windows[#windows + 1] = {
    key = KEYS[k], slice_ms = tonumber(ARGV[argument]), flags = ARGV[argument + 1], refuses = ARGV[argument + 2],
    r = tonumber(ARGV[argument + 3]), t = tonumber(ARGV[argument + 4]), u = tonumber(ARGV[argument + 5]),
  }
  argument = argument + 6
end
local first_slots = 7 + number_of_periods + number_of_windows
local first_queue = first_slots + (#KEYS - 6 - number_of_periods - 3 * number_of_windows) / 3
for k = first_slots, first_queue - 1 do
  slots[#slots + 1] = {key = KEYS[k], most = tonumber(ARGV[argument]), refuses = ARGV[argument + 1], is_slots = true}
  argument = argument + 2
end
local my_key, my_tenant, my_share = ARGV[argument], ARGV[argument + 1], tonumber(ARGV[argument + 2])
local can_wait_ms = tonumber(ARGV[argument + 3] or '')
local rates, number_of_rates = {}, first_queue - first_slots + number_of_windows
for i = 1, number_of_rates do
  local rate = windows[i] or slots[i - number_of_windows]
  rate.queue, rate.waiters = KEYS[first_queue + i - 1], KEYS[first_queue + number_of_rates + i - 1]
  rates[i] = rate
end

-- True if a reservation is of the same amounts in the same places. Once the lease of a slot has ended, another call may
-- have it.
local function is_as_asked(held)
  if held.amount ~= worst.u or held.tokens ~= worst.t or #held.periods ~= #periods or #held.windows ~= #windows
    or #held.slots ~= #slots or string.sub(held.lines, 1, #counter_lines) ~= counter_lines then
    return false
  end
  for i, window in ipairs(windows) do
    if held.windows[i].key ~= window.key then
      return false
    end
  end
  for i, slot in ipairs(slots) do
    local ends = held.slots[i] == slot.key and redis.call('ZSCORE', slot.key, attempt_id)
    if not ends or tonumber(ends) <= now then
      return false
    end
  end
  return true
end
local before = parse(redis.call('HGET', reservations, attempt_id))
if before and (before.state ~= 'r' or asked_at or is_as_asked(before)) then
  if before.state == 'r' and lease_ms then
    redis.call('ZADD', leases, 'GT', now + lease_ms, attempt_id)
    for _, slot in ipairs(slots) do
      redis.call('ZADD', slot.key, 'XX', 'GT', now + lease_ms, attempt_id)
      keep(slot.key, lease_ms)
    end
  end
  return {1, before.ms}
elseif before and lease_ms then
  return {9, table.concat(further_keys(before, {}) or {}, '\n')}
end
local source = redis.call('HMGET', filled_key, 'log', 'dimensions', 'limits', 'since')
if version ~= '' and source[3] ~= version and not asked_at and (not source[3] or is_older(version, source[3])) then
  return {8, source[3] or ''}
end
-- A reservation that Redis had lost is of the dimensions that were counted then.
if source[1] and not asked_at and (source[2] or '') ~= dimensions then
  return {5, source[2] or ''}
end
if is_incomplete then
  return {3}
end
local at = asked_at or now
for _, period in ipairs(periods) do
  if at < period.first or at >= period.over then
    return {2, now}
  end
end
local has_queue = number_of_rates > 0 and not asked_at
  and redis.call('EXISTS', unpack(KEYS, first_queue, first_queue + number_of_rates - 1)) > 0
-- Answers a call that does not ask again, and so waits for nothing any more.
local function refuse(answer)
  leave_queues(lease_ms and has_queue and rates or {}, attempt_id)
  return answer
end
-- New counters are made for so many names of one sender in a period, who may make up any.
local names = 'names:' .. caller
local added = {}
for _, counter in ipairs(lease_ms and most_names and counters or {}) do
  local key = counter.period.key
  if string.find(counter.flags, 'n', 3, true) and redis.call('HEXISTS', key, counter.field) == 0 then
    added[key] = (added[key] or tonumber(redis.call('HGET', key, names) or '0')) + 1
    if added[key] > most_names then
      return refuse({4})
    end
  end
end
-- What keeps the call out. A limit that refuses calls precedes those for which they wait; then, the longest wait counts.
local kept_out
local function keep_out(rank, wait_ms, answer)
  if not kept_out or rank > kept_out.rank or (rank == kept_out.rank and wait_ms > kept_out.wait_ms) then
    kept_out = {rank = rank, wait_ms = wait_ms, answer = answer}
  end
end
local WAITS, REFUSES, NEVER_FITS = 0, 1, 2

-- Counters
for _, counter in ipairs(counters) do
  local fields = counter.period.fields
  local n = #fields + 1
  counter.first_value, fields[n] = n, counter.field
  if counter.cap ~= '' then
    if not source[1] or (source[4] and source[4] ~= redis.call('GET', KEYS[6])) then
      return {3} -- or they may lack what was counted last, as another server is the primary now
    end
    fields[n + 1] = USED[counter.unit] .. counter.scope
  end
end
for _, period in ipairs(periods) do
  period.values = redis.call('HMGET', period.key, unpack(period.fields))
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
local function note_waiting(period, sharer)
  local until_ms, waiting, other_until_ms, other_waiting, name = string.match(sharer.note, NOTE)
  if name ~= sharer.name then
    other_until_ms, other_waiting = until_ms or '0', waiting or '0'
  end
  local text = string.format('%.0f|%.0f|%s|%s|%s', now + waits_ms, worst.u, other_until_ms, other_waiting, sharer.name)
  period.notes[#period.notes + 1], period.notes[#period.notes + 2] = sharer.field, text
end
-- True if a tenant or a caller asks for more than its share of the rest, which it has while another holds some of it or waits.
-- One that waits for more than a share has none itself: two of them would keep each other out for ever.
local function is_over_share(sharer, scope, left, amount)
  local own, others = share_of(sharer.name, sharer.index, scope)
  if not others then
    local until_ms, waiting, other_until_ms, other_waiting, name = string.match(sharer.note, NOTE)
    if name == sharer.name then
      until_ms, waiting = other_until_ms, other_waiting
    end
    others = until_ms and tonumber(until_ms) > now and 2 * tonumber(waiting) <= left
  end
  return others and 2 * (own + amount) > left
end
for number, counter in ipairs(counters) do
  if counter.cap ~= '' then
    local period, first = counter.period, counter.first_value
    local limit = tonumber(counter.cap)
    local amount = worst[counter.unit]
    local reserved, used = period.values[first] or '0', period.values[first + 1] or '0'
    local left = limit - tonumber(used) -- added up, a double might not hold them
    local is_full, is_over, sharers = amount > left - tonumber(reserved), false, nil
    -- A caller's part of less than half is no more than its share.
    if amount > 0 and amount <= left and 2 * (tonumber(reserved) + amount) > left then
      sharers = {}
      for _, sharer in ipairs({
        {flag = 'x', name = tenant, index = 2, field = 'tenant_waits:'}, {flag = 'y', name = caller, index = 3, field = 'caller_waits:'},
      }) do
        if string.find(counter.flags, sharer.flag, 3, true) then
          sharer.field = sharer.field .. counter.scope
          sharer.note = redis.call('HGET', period.key, sharer.field) or ''
          is_over = is_over or is_over_share(sharer, counter.scope, left, amount)
          sharers[#sharers + 1] = sharer
        end
      end
    end
    if is_full or is_over then
      if lease_ms and 2 * worst.u <= left then
        for _, sharer in ipairs(sharers or {}) do
          note_waiting(period, sharer)
        end
      end
      local refusal = {0, number, integer(limit), used, reserved, is_full and 0 or 1}
      if amount > left then
        return refuse(refusal)
      end
      keep_out(WAITS, 0, refusal) -- by calls in flight, which mostly cost less: a budget that is spent precedes it
    end
  end
end
for _, period in ipairs(periods) do
  if #period.notes > 0 and redis.call('HSET', period.key, unpack(period.notes)) > 0 then
    redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  end
end

-- Queues
local FIRST = 30 -- so many calls are read from the head of a queue: what the others wait with is estimated
local PATIENCE_MS = 2000 -- a call that asks so much later than it should has lost its place
local may_sweep = 200 -- places of calls that did not ask again are taken from one queue, so many at most
local function is_over(text)
  local until_ms = string.match(text or '', '^%d+')
  return not until_ms or tonumber(until_ms) <= now
end
-- The virtual time at which the call would be through: the one that it has, or the one that it would get. What it takes is its
-- part of the amount that it needs the largest part of, in millionths.
local function finish_of(rate)
  local finish = redis.call('ZSCORE', rate.queue, attempt_id)
  if finish then
    rate.waits = true
    return tonumber(finish)
  end
  local part = rate.is_slots and 1 / rate.most or 0
  for _, unit in ipairs(rate.is_slots and {} or {'r', 't', 'u'}) do
    if rate[unit] and rate[unit] > 0 then
      part = math.max(part, worst[unit] / rate[unit])
    end
  end
  local me = caller_of(my_key, my_tenant)
  local known = redis.call('HMGET', rate.waiters, 'v', 'l' .. me, 'k' .. my_key, 'w' .. me)
  local tenants = math.max(1, (known[3] or 0) + (known[4] and 0 or 1))
  return math.max(tonumber(known[1] or 0), tonumber(known[2] or 0)) + 1000000 * part * tenants / my_share
end
-- The first calls of a queue, what they wait with, and of how many of them the time is over.
local function first_of(rate, most)
  local attempts, fields, over = most > 0 and redis.call('ZRANGE', rate.queue, 0, most - 1) or {}, {}, 0
  for i, attempt in ipairs(attempts) do
    fields[i] = 'a' .. attempt
  end
  local texts = #fields > 0 and redis.call('HMGET', rate.waiters, unpack(fields)) or {}
  for _, text in ipairs(texts) do
    if is_over(text) then
      over = over + 1
    end
  end
  return attempts, texts, over
end
-- Takes calls that are over out of the first places of a queue.
local function sweep(rate, most)
  local attempts, texts = first_of(rate, most)
  local gone, gone_texts = {}, {}
  for i, text in ipairs(texts) do
    if is_over(text) then
      gone[#gone + 1], gone_texts[#gone + 1] = attempts[i], text
    end
  end
  leave_queue(rate, gone, gone_texts)
end
-- What stands before the call in the queue of a rate: the number of calls, requests, tokens and nano-dollars; `is_unswept` if
-- calls that are over may be among them.
local function before_in(rate)
  rate.finish = finish_of(rate)
  local function ahead()
    return rate.waits and redis.call('ZRANK', rate.queue, attempt_id) or redis.call('ZCOUNT', rate.queue, '-inf', rate.finish)
  end
  local sums = {calls = ahead(), r = 0, t = 0, u = 0}
  local _, texts, over = first_of(rate, math.min(sums.calls, FIRST))
  if over > 0 and may_sweep > 0 then
    sweep(rate, math.min(sums.calls, may_sweep))
    may_sweep = 0
    sums.calls = ahead()
    _, texts, over = first_of(rate, math.min(sums.calls, FIRST))
  end
  sums.is_unswept = over > 0
  for _, text in ipairs(texts) do
    local tokens, amount = string.match(text or '', '^%d+|%d+|(%d+)|(%d+)\n')
    sums.r, sums.t, sums.u = sums.r + 1, sums.t + (tokens or 0), sums.u + (amount or 0)
  end
  if sums.calls > FIRST then
    for _, unit in ipairs({'r', 't', 'u'}) do
      sums[unit] = math.floor(sums[unit] * sums.calls / FIRST)
    end
  end
  return sums
end
local NOTHING = {calls = 0, r = 0, t = 0, u = 0}
local waits_for -- the number of the first rate that has no room for the call

-- Windows
-- The ms until the oldest slices that make up the excess are over. Mostly a few do, so they are read a few at a time. What
-- exceeds all that counts now has to wait until what stands before it is over, too, one window after the other.
local function wait_ms_of(window, unit, excess)
  local sums, most = window.sums, window[unit]
  if excess > tonumber(sums[unit]) and most > 0 then
    local later = math.ceil((excess - sums[unit]) / most)
    return later * (SLICES + 1) * window.slice_ms + (excess > later * most and wait_ms_of(window, unit, excess - later * most) or 0)
  end
  for from = sums.first, sums.last, 10 do
    local fields = {}
    for old = from, math.min(from + 9, sums.last) do
      fields[#fields + 1] = unit .. old
    end
    for i, count in ipairs(redis.call('HMGET', window.key, unpack(fields))) do
      excess = excess - (count or 0)
      if excess <= 0 then
        return (from + i + SLICES) * window.slice_ms - now
      end
    end
  end
  return (sums.last + SLICES + 1) * window.slice_ms - now
end
-- When a call should ask again. What is under way mostly ends long before its lease, and with less than its worst case: then
-- those who stand in front ask often.
local function ask_again_ms(wait_ms, ahead, may_end_soon)
  if ahead.is_unswept then
    return math.min(wait_ms, 50)
  end
  return may_end_soon and math.min(wait_ms, 50 * (1 + ahead.calls)) or wait_ms
end
local new_names = 0
for number, window in ipairs(windows) do
  window.sums = sums_of(window, now)
  if window.sums.is_new and string.find(window.flags, 'm', 1, true) then
    new_names = new_names + 1
  end
  local ahead = has_queue and not waits_for and before_in(window) or NOTHING
  for _, unit in ipairs({'r', 't', 'u'}) do
    local most = window[unit]
    if most and worst[unit] > most then
      keep_out(NEVER_FITS, 0, {6, number, unit, -1, -1, 0})
    elseif most then
      local is_refused = string.find(window.refuses, unit, 1, true)
      local excess = window.sums[unit] + worst[unit] - most + (is_refused and 0 or ahead[unit])
      if excess > 0 then
        local wait_ms = wait_ms_of(window, unit, excess)
        local ask_ms = ask_again_ms(wait_ms, ahead, unit ~= 'r' and tonumber(window.sums.c) > 0)
        keep_out(is_refused and REFUSES or WAITS, wait_ms, {6, number, unit, wait_ms, ask_ms, ahead.calls})
        waits_for = waits_for or not is_refused and number or nil
      end
    end
  end
end

if new_names > 0 and lease_ms and most_names then
  redis.call('ZREMRANGEBYSCORE', names_key, '-inf', now)
  if redis.call('ZCARD', names_key) + new_names > most_names then
    return refuse({4})
  end
end

-- Slots: asked last, as a concurrent call may end at any moment.
for number, slot in ipairs(kept_out and {} or slots) do
  local before = slot.most and has_queue and not waits_for and slot.refuses ~= 'c' and before_in(slot) or NOTHING
  local ahead = before.calls
  local calls = slot.most and redis.call('ZCARD', slot.key)
  if slot.most and calls + ahead >= slot.most then
    redis.call('ZREMRANGEBYSCORE', slot.key, '-inf', now)
    calls = redis.call('ZCARD', slot.key)
    if calls + ahead >= slot.most then
      local at = math.max(0, math.min(calls + ahead - slot.most, calls - 1))
      local ends = redis.call('ZRANGE', slot.key, at, at, 'WITHSCORES')
      local wait_ms = ends[2] and tonumber(ends[2]) - now or PATIENCE_MS
      local is_refused = slot.refuses == 'c'
      keep_out(is_refused and REFUSES or WAITS, wait_ms, {7, number, wait_ms, ask_again_ms(wait_ms, before, true), ahead})
      waits_for = waits_for or not is_refused and #windows + number or nil
    end
  end
end
-- Keeps the call's place in the queues of the rates before the one that has no room for it, and takes it there.
local function stand_in_queue(ask_ms)
  local until_ms = now + ask_ms + math.min(ask_ms / 4, 10000) + PATIENCE_MS
  for number, rate in ipairs(rates) do
    local is_last = number == waits_for
    if is_last or rate.waits and (not waits_for or number < waits_for) then
      local me, since = caller_of(my_key, my_tenant), now
      if rate.waits then
        since = string.match(redis.call('HGET', rate.waiters, 'a' .. attempt_id) or '', '^%d+|(%d+)') or now
      else
        rate.finish = rate.finish or finish_of(rate)
        redis.call('ZADD', rate.queue, rate.finish, attempt_id)
        redis.call('HSET', rate.waiters, 'l' .. me, string.format('%.3f', rate.finish))
        if redis.call('HINCRBY', rate.waiters, 'w' .. me, 1) == 1 then
          redis.call('HINCRBY', rate.waiters, 'k' .. my_key, 1)
        end
      end
      local times = integer(until_ms) .. '|' .. integer(tonumber(since))
      local text = table.concat({times, integer(worst.t), integer(worst.u)}, '|') .. '\n' .. me
      redis.call('HSET', rate.waiters, 'a' .. attempt_id, text)
      keep(rate.queue, ask_ms * 2 + 60000)
      keep(rate.waiters, ask_ms * 2 + 60000)
    elseif has_queue then
      leave_queues({rate}, attempt_id)
    end
  end
end

local function with_figures(answer)
  for _, window in ipairs(windows) do
    local sums, n = window.sums, #answer
    answer[n + 1], answer[n + 2], answer[n + 3] = sums.r, sums.t, (sums.last + SLICES + 1) * window.slice_ms - now
  end
  return answer
end
-- Here it is decided whether the call waits, or is refused.
if kept_out then
  local answer = kept_out.answer
  local ask_ms = answer[1] == 6 and answer[5] or answer[1] == 7 and answer[4] or waits_ms
  if answer[1] ~= 0 then
    with_figures(answer)
  end
  if kept_out.rank ~= WAITS or (can_wait_ms and ask_ms >= can_wait_ms) then
    return refuse(answer)
  end
  if lease_ms and not asked_at then
    stand_in_queue(ask_ms)
  end
  return answer
end
local call = {
  amount = worst.u, tokens = worst.t, ms = integer(at), agent = agent, tenant = tenant, caller = caller,
}
if not lease_ms then
  return {1, call.ms}
end
for key, count in pairs(added) do
  redis.call('HSET', key, names, count)
end
leave_queues(has_queue and rates or {}, attempt_id)
for _, rate in ipairs(has_queue and rates or {}) do
  if rate.finish and redis.call('EXISTS', rate.queue) == 1 then
    local virtual_time = tonumber(redis.call('HGET', rate.waiters, 'v') or 0)
    redis.call('HSET', rate.waiters, 'v', string.format('%.3f', math.max(virtual_time, rate.finish)))
  end
end
local shared = {}
for _, counter in ipairs(counters) do
  local period, amount = counter.period, worst[counter.unit]
  local n, sum = #period.changes, tonumber(period.values[counter.first_value] or 0) + amount
  if sum < EXACT then
    period.changes[n + 1], period.changes[n + 2] = counter.field, sum
  else
    redis.call('HINCRBY', period.key, counter.field, integer(amount))
  end
  period.is_fresh = period.is_fresh or sum == amount -- nothing else is reserved, and maybe nothing was counted yet
  if #counter.flags > 2 and string.find(counter.flags, 'h', 3, true) then
    shared[#shared + 1] = counter.scope
  end
end
for _, period in ipairs(periods) do
  if #period.changes > 0 then
    redis.call('HSET', period.key, unpack(period.changes))
  end
  if period.is_fresh then
    redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  end
end
call.periods = {{shared = shared}}
share(held_key, call, worst.u)
-- Units without a limit are counted, too: one that is set later holds immediately.
local lines = {header_of(call, 'r'), counter_lines}
for _, window in ipairs(windows) do
  local sums = window.sums
  local changes, added = {'first', sums.first, 'last', sums.last}, {r = 1, t = worst.t, u = worst.u, c = 1}
  for i, unit in ipairs(UNITS) do
    sums[unit] = sums[unit] + added[unit]
    local n = #changes
    changes[n + 1], changes[n + 2], changes[n + 3], changes[n + 4] =
      unit, sums[unit], sums.fields[i], sums.of_slice[i] + added[unit]
  end
  redis.call('HSET', window.key, unpack(changes))
  if sums.is_fresh then
    local ends = (sums.last + SLICES + 1) * window.slice_ms
    redis.call('PEXPIREAT', window.key, ends)
    if string.find(window.flags, 'm', 1, true) then
      redis.call('ZADD', names_key, ends, window.key)
      keep(names_key, ends - now)
    end
  end
  lines[#lines + 1] = table.concat({'\nw', window.key, '\t', integer(sums.last), '\t', window.flags})
end
for _, slot in ipairs(slots) do
  redis.call('ZADD', slot.key, now + lease_ms, attempt_id)
  keep(slot.key, lease_ms)
  lines[#lines + 1] = '\ns' .. slot.key
end
redis.call('HSET', reservations, attempt_id, table.concat(lines))
redis.call('ZADD', leases, now + lease_ms, attempt_id)
return with_figures({1, call.ms})

--- use_of_rates
-- Reads what counts in windows, and the calls that have slots.
-- KEYS: windows..., slots...   ARGV: for each window: ms of a slice
-- Returns for each window its requests, tokens and nano-dollars, then for each slots its calls.
local now, answer = now_ms(), {}
for i, key in ipairs(KEYS) do
  if ARGV[i] then
    local sums = sums_of({key = key, slice_ms = tonumber(ARGV[i])}, now)
    for _, unit in ipairs({'r', 't', 'u'}) do
      answer[#answer + 1] = integer(sums[unit])
    end
  else
    answer[#answer + 1] = redis.call('ZCOUNT', key, '(' .. integer(now), '+inf')
  end
end
return answer

--- release
-- Ends a reservation: releases it where its call was never made, or charges what the call used in its place until the
-- attempt's event settles it.
-- KEYS: reservations, leases, held, then those of the reservation's places
-- ARGV: attempt; nano-dollars, '' where the call was never made; tokens, all and without input from a cache ('' = unknown); '1'
-- where the provider's rate limit refused it
-- Returns 1, or 0 where nothing is reserved, in these places.
local attempt_id = ARGV[1]
local used = ARGV[2] ~= ''
  and {amount = read_integer(ARGV[2]), tokens = read_integer(ARGV[3]), uncached = tonumber(ARGV[4]), is_refused = ARGV[5] == '1'} or nil
local reservations, leases, held_key, told = KEYS[1], KEYS[2], KEYS[3], set_of_keys()
local held = parse(redis.call('HGET', reservations, attempt_id))
if not held or held.state ~= 'r' or further_keys(held, told) then
  return 0
end
leave(held, told, attempt_id, used)
charge(held, held_key, used)
if used then
  redis.call('HSET', reservations, attempt_id, charged_text(held, 's'))
else
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
end
return 1

--- withdraw
-- Takes a call that is not to be made out of the queues of its rates.
-- KEYS: the queue of each rate, then what waits in each
-- ARGV: attempt
local rates, count = {}, #KEYS / 2
for i = 1, redis.call('EXISTS', unpack(KEYS, 1, count)) > 0 and count or 0 do
  rates[i] = {queue = KEYS[i], waiters = KEYS[count + i]}
end
leave_queues(rates, ARGV[1])
return 1

--- settle
-- Replaces reservations by the costs of the calls, each once for each event of the log, which has a bit in a block. Counters
-- are added to once for all settlements of a batch.
-- KEYS: reservations, leases, filled, held, applied blocks..., periods..., windows and slots...
-- ARGV from the 9th, for each period: keep until (ms); for each place: number of its period, scope; then the number of groups of
-- calls in the same places, and for each: number of places, their numbers; then for each settlement: attempt, sequence, index of
-- the block's key, bit, tokens, all and without input from a cache ('' = unknown), '1' where the provider's rate limit refused
-- it, number of its group, number of figures, their names and values.
-- Returns {for each settlement 1 (counted), 0 (counted before) or the further keys of its reservation, with which it is
-- repeated; for each place its spend}; {3} where the counters are not those of this log,
-- {5, dimensions} where others are counted.
local log, zone, block_keep_ms, settlements = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local first_period, number_of_places = 5 + tonumber(ARGV[5]), tonumber(ARGV[6])
local reservations, leases, filled_key, held_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local filled = redis.call('HMGET', filled_key, 'log', 'zone', 'upto', 'dimensions')
if filled[1] ~= log or filled[2] ~= zone then
  return {3}
end
if (filled[4] or '') ~= ARGV[7] then
  return {5, filled[4] or ''}
end
local now, argument = now_ms(), 9
local function take()
  argument = argument + 1
  return ARGV[argument - 1]
end

local periods, by_key, told = {}, {}, set_of_keys()
for k = first_period, first_period + ARGV[8] - 1 do
  local period = {key = KEYS[k], keep_until_ms = take(), sums = {}, changed = {}, asked = {}}
  period.over = tonumber(period.keep_until_ms) <= now -- long over, and not counted any more
  periods[#periods + 1], by_key[period.key] = period, period
end
local places = {}
for p = 1, number_of_places do
  local period, scope = periods[tonumber(take())], take()
  period.asked[#period.asked + 1] = 'spent:' .. scope
  places[p] = {period = period, scope = scope, at = #period.asked, sums = {}}
end
local groups = {}
for g = 1, tonumber(take()) do
  local group = {places = {}, sums = {}}
  for p = 1, tonumber(take()) do
    group.places[p] = places[tonumber(take())]
  end
  groups[g] = group
end
local batch, attempts = {}, {}
for i = 1, settlements do
  local settlement = {
    attempt = take(), sequence = tonumber(take()), block = KEYS[tonumber(take())], bit = take(),
    used = {amount = 0, tokens = tonumber(take()), uncached = tonumber(take()), is_refused = take() == '1'},
    group = groups[tonumber(take())], figures = {},
  }
  for f = 1, tonumber(take()) do
    local figure = {name = take(), value = tonumber(take())}
    settlement.figures[f] = figure
    if figure.name == 'spent' then
      settlement.used.amount = figure.value
    end
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
  local before = period.sums[field]
  if not before then
    before = 0
    period.changed[#period.changed + 1] = field
  elseif math.abs(before + amount) >= EXACT then
    redis.call('HINCRBY', period.key, field, integer(before))
    before = 0
  end
  period.sums[field] = before + amount
end
-- Sums are gathered for all calls in the same places first, and then for each place. `spread(gathered)` passes them on.
local function gather(gathered, name, amount, spread)
  local before = gathered.sums[name] or 0
  if math.abs(before + amount) >= EXACT then
    spread(gathered)
    before = 0
  end
  gathered.sums[name] = before + amount
end
local function count_in(place)
  for name, amount in pairs(place.sums) do
    sum(place.period, name .. ':' .. place.scope, amount)
  end
  place.sums = {}
end
local function count(group)
  for _, place in ipairs(group.places) do
    local sums = place.sums
    for name, amount in pairs(group.sums) do
      local sum_in_place = (sums[name] or 0) + amount
      if sum_in_place < EXACT and sum_in_place > -EXACT then
        sums[name] = sum_in_place
      else
        gather(place, name, amount, count_in)
        sums = place.sums
      end
    end
  end
  group.sums = {}
end
local ended = {}
local function free(gathered)
  for_each(gathered.periods, gathered.state, gathered.sums, function(key, field, amount)
    sum(by_key[key], field, -amount)
  end)
  gathered.sums = {u = 0, t = 0, r = 0}
end
local function end_held(reservation)
  local id = (reservation.state == 'r' and 'r' or 's') .. reservation.lines
  local gathered = ended[id]
  if not gathered then
    gathered = {periods = reservation.periods, state = reservation.state, sums = {u = 0, t = 0, r = 0}}
    ended[id] = gathered
  end
  for unit, amount in pairs(amounts_of(reservation)) do
    gather(gathered, unit, amount, free)
  end
end
local answers, settled, blocks = {}, {}, {}
for i, settlement in ipairs(batch) do
  local reservation = held[settlement.attempt]
  local further = reservation and further_keys(reservation, told)
  if further then
    answers[i] = table.concat(further, '\n')
  else
    if reservation then
      end_held(reservation)
      if reservation.state == 'r' then
        share(held_key, reservation, -reservation.amount)
      end
      leave(reservation, told, settlement.attempt, settlement.used)
      held[settlement.attempt] = nil
      settled[#settled + 1] = settlement.attempt
    end
    local counted = settlement.sequence > tonumber(filled[3]) and 1 - redis.call('SETBIT', settlement.block, settlement.bit, 1)
      or 0
    if counted == 1 then
      blocks[settlement.block] = true
      for _, figure in ipairs(settlement.figures) do
        gather(settlement.group, figure.name, figure.value, count)
      end
    end
    answers[i] = counted
  end
end

for _, group in ipairs(groups) do
  count(group)
end
for _, place in ipairs(places) do
  count_in(place)
end
for _, gathered in pairs(ended) do
  free(gathered)
end
if #settled > 0 then
  redis.call('HDEL', reservations, unpack(settled))
  redis.call('ZREM', leases, unpack(settled))
end
for block in pairs(blocks) do
  redis.call('PEXPIRE', block, block_keep_ms)
end
for _, period in ipairs(periods) do
  for first = 1, #period.changed, 1000 do -- of more, Lua's stack has no room
    local fields, amounts = {}, {}
    for i = first, math.min(first + 999, #period.changed) do
      local field = period.changed[i]
      if period.sums[field] ~= 0 then
        fields[#fields + 1], amounts[#amounts + 1] = field, period.sums[field]
      end
    end
    add(period.key, fields, amounts)
  end
  redis.call('PEXPIREAT', period.key, period.keep_until_ms)
  period.values = #period.asked > 0 and redis.call('HMGET', period.key, unpack(period.asked)) or {}
end
local totals = {}
for _, place in ipairs(places) do
  totals[#totals + 1] = place.period.values[place.at] or '0'
end
return {answers, totals}

--- lapse
-- Charges a reservation as reserved when its lease has ended and no event has reported what the call cost. The event may
-- still come: settling it then corrects the charge. Called again long after, it forgets the reservation, which stays charged.
-- Until the lease has ended by Redis' clock nothing happens: another caller has charged it, or it was reserved again.
-- KEYS: reservations, leases, held, then those of the reservation's places
local attempt_id, forget_at_ms = ARGV[1], ARGV[2]
local reservations, leases, held_key, told = KEYS[1], KEYS[2], KEYS[3], set_of_keys()
local ends = redis.call('ZSCORE', leases, attempt_id)
if ends and tonumber(ends) > now_ms() then
  return 0
end
local held = parse(redis.call('HGET', reservations, attempt_id))
if not held or held.state == 'e' then
  redis.call('HDEL', reservations, attempt_id)
  redis.call('ZREM', leases, attempt_id)
  return 0
end
if further_keys(held, told) then
  return 0
end
if held.state == 'r' then
  local as_reserved = {amount = held.amount}
  leave(held, told, attempt_id, as_reserved)
  charge(held, held_key, as_reserved)
end
-- A worker that has charged the cost, and died before it could record that, has state 's'.
redis.call('HSET', reservations, attempt_id, charged_text(held, 'e'))
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
local answer = {redis.call('HMGET', KEYS[1], 'log', 'zone', 'upto', 'alone', 'repairs', 'dimensions', 'limits', 'since'), copies}
for k = 2, 1 + blocks do
  answer[k + 1] = string.gsub(redis.call('GET', KEYS[k]) or '', '.', hex)
end
return answer

--- fill
-- Sets all counters to the figures of the event log, once: the second caller changes nothing. The figures were stored in
-- parts before, as nothing else runs in Redis meanwhile. Reservations of calls under way are kept.
-- KEYS: filled, reservations, held, since when Redis has its data, then for each period: its counters, and the figures that they become
-- ARGV from the 9th, for each period: keep until (ms), number of fields
-- Returns 1, 0 where the counters are not filled as the caller believed, or 2 where the figures are not all there.
local log, zone, upto, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4] -- alone 1: nothing in it is from another log
local log_before, zone_before = ARGV[5], ARGV[6] -- what they are filled from now; '': they are not filled
local filled, reservations_key, held_key, first_period, argument = KEYS[1], KEYS[2], KEYS[3], 5, 9
local source, since = redis.call('HMGET', filled, 'log', 'zone'), ARGV[8] -- '': it was not known when the filling began
if (source[1] or '') ~= log_before or (source[2] or '') ~= zone_before
  or (since ~= '' and since ~= redis.call('GET', KEYS[4])) then
  return 0
end
local keep_until = {}
for k = first_period, #KEYS, 2 do
  if redis.call('HLEN', KEYS[k + 1]) ~= tonumber(ARGV[argument + 1]) then
    return 2
  end
  keep_until[KEYS[k]] = ARGV[argument]
  argument = argument + 2
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
      for_each(held.periods, held.state, amounts_of(held), function(key, field, amount)
        if keep_until[key] then
          redis.call('HINCRBY', key, field, integer(amount))
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
-- A new number with each filling: a repair that was computed before it is refused after it.
local time = redis.call('TIME')
local number = string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('HSET', filled, 'log', log, 'zone', zone, 'upto', upto, 'alone', alone, 'repairs', number, 'dimensions', ARGV[7],
  'since', kept_since(KEYS[4]))
return 1

--- confirm
-- Says that the counters lack nothing of what was counted before Redis had its data, unless that has begun anew.
-- KEYS: filled, since when Redis has its data   ARGV: since when it had them
if redis.call('GET', KEYS[2]) == ARGV[1] and redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'since', ARGV[1])
end
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

--- note_limits
-- Notes the version of the limits that are in force, unless a newer one is noted.
-- KEYS: filled   ARGV: version; the version that its stream contradicts, as the stream was recreated or restored ('' = none)
local known = redis.call('HGET', KEYS[1], 'limits')
if not known or known == ARGV[2] or is_older(known, ARGV[1]) then
  redis.call('HSET', KEYS[1], 'limits', ARGV[1])
end
return 1

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
