-- Looks at a job of the tenant for a child of it. One that is under way, and has no task but its own, learns that it has
-- children there.
-- KEYS: execution of the parent
-- Returns {its task or '', its checkpoint or ''}: two times '' where nothing is known of such a job.
local tenant, look_only = ARGV[1], ARGV[2] -- tenant '' for none; look_only '1': it learns nothing
local known = redis.call('HMGET', KEYS[1], 'tenant', 'task', 'checkpoint', 'token')
if (known[1] or '') ~= tenant then
  return {'', ''}
end
if (known[3] or known[4]) and not known[2] and look_only == '0' then
  redis.call('HSET', KEYS[1], 'children', 1)
end
return {known[2] or '', known[3] or ''}
