-- A call is answered: nobody attaches to it any more.
-- KEYS: who waits
local job, fields = ARGV[1], redis.call('HGETALL', KEYS[1])
for at = 1, #fields, 2 do
  if fields[at + 1] == job then
    redis.call('HDEL', KEYS[1], fields[at])
  end
end
return 1
