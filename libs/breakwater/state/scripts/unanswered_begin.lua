-- A request begins to wait for the answer to a question. One that repeats another attaches to its call: to one that
-- nobody waits for any more before all others.
-- KEYS: who waits, by what is asked: a field for each request, and one for each call whose requests have left
-- Returns the call that it waits for: its own, or one that was there.
local request, own, attaches, keep_s = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local job = redis.call('HGET', KEYS[1], request)
if not job and attaches then
  local waiting, fields = {}, redis.call('HGETALL', KEYS[1])
  for at = 1, #fields, 2 do
    local of = fields[at + 1]
    waiting[of] = (waiting[of] or 0) + (fields[at] == 'left:' .. of and 0 or 1)
  end
  for of, count in pairs(waiting) do
    -- The latest of equals: a process that died may have left an earlier one behind.
    if not job or count < waiting[job] or (count == waiting[job] and of > job) then
      job = of
    end
  end
end
job = job or own
redis.call('HSET', KEYS[1], request, job)
if redis.call('TTL', KEYS[1]) < keep_s then
  redis.call('EXPIRE', KEYS[1], keep_s)
end
return job
