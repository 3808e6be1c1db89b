-- Replaces reservations by what the calls cost, each once for each event of the log, which has a bit in a block. Counters are
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
local time = redis.call('TIME')
local now, at = time[1] * 1000 + math.floor(time[2] / 1000), 6
local function take()
  at = at + 1
  return ARGV[at - 1]
end
local function integer(number)
  return string.format('%.0f', number)
end

local periods = {}
for k = first_period, #KEYS do
  local name, keep_until_ms = take(), take()
  -- What is long over is not counted any more.
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
      -- Of an owner with a caller, a share is counted (see budget_reserve).
      local has_share = state == 'r' and amount ~= '0' and string.find(owner, '\n.*\n')
      if has_share and redis.call('HINCRBY', held_key, owner, '-' .. amount) <= 0 then
        redis.call('HDEL', held_key, owner)
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
