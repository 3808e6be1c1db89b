-- A request waits no longer for its call, which is not answered. Where nobody does, the call is kept for a repeated
-- request, or is forgotten, as it is about to be cancelled: whoever asks from now on makes a call of its own.
-- KEYS: who waits
-- Returns 1 where nobody waits for the call any more, else 0.
local request, job, cancelled, keep_s = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local waited = redis.call('HDEL', KEYS[1], request) == 1
local fields = redis.call('HGETALL', KEYS[1])
for at = 1, #fields, 2 do
  if fields[at + 1] == job and fields[at] ~= 'left:' .. job then
    return 0
  end
end
if cancelled then
  redis.call('HDEL', KEYS[1], 'left:' .. job)
elseif waited then -- else it was answered to another request
  redis.call('HSET', KEYS[1], 'left:' .. job, job)
  if redis.call('TTL', KEYS[1]) < keep_s then
    redis.call('EXPIRE', KEYS[1], keep_s)
  end
end
return 1
