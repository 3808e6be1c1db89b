-- The scripts of the room in RESPONSES, which drops its oldest messages when it is full. Nothing that is under way is dropped
-- if less than the stream takes has been stored since the oldest of it began. What is stored is counted in slices of time.
local SLICE_MS, KEEP_MS = 600000, 27 * 3600000 -- for longer than a response can be under way
local now = now_ms()
local slice = math.floor(now / SLICE_MS)

local function add(key, bytes)
  redis.call('HINCRBY', key, slice, bytes)
  redis.call('PEXPIRE', key, KEEP_MS)
end

local function stored_since(key, first)
  local slices, sum = redis.call('HGETALL', key), 0
  for i = 1, #slices, 2 do
    local at = tonumber(slices[i])
    if at < slice - KEEP_MS / SLICE_MS then
      redis.call('HDEL', key, slices[i])
    elseif at >= first then
      sum = sum + slices[i + 1]
    end
  end
  return sum
end

--- take
-- Takes room for the request of a response.
-- KEYS: bytes stored by slice, the same of its owner, executions under way by their beginnings
-- Returns {'taken'}; {'share'} where the owner has no room left, {'under_way', the oldest} where there is none.
local bytes, share, window = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], 0, now - KEEP_MS)
local oldest = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
local first = oldest[1] and math.min(slice, math.floor(oldest[2] / SLICE_MS)) or slice
if stored_since(KEYS[2], first) + bytes > share then
  return {'share', oldest[1] or ''}
end
if oldest[1] and stored_since(KEYS[1], first) + bytes > window then
  return {'under_way', oldest[1]}
end
add(KEYS[1], bytes)
add(KEYS[2], bytes)
return {'taken', ''}

--- count
-- Counts chunks that were stored.
-- KEYS: bytes stored by slice, the same of the owner
add(KEYS[1], ARGV[1])
add(KEYS[2], ARGV[1])
return 1

--- begin
-- Notes that a response is under way.
-- KEYS: executions under way by their beginnings
redis.call('ZADD', KEYS[1], 'NX', now, ARGV[1])
return redis.call('PEXPIRE', KEYS[1], KEEP_MS)

--- finish
-- KEYS: the same
return redis.call('ZREM', KEYS[1], ARGV[1])
