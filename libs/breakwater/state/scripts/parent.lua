-- Looks at a job of the tenant for a child of it. One that has no task but its own learns that it has children there, also
-- where it is not begun yet.
-- KEYS: execution of the parent; cancel requests for it, and what else is for whoever has it
-- Returns {its task or '', its checkpoint or ''}: two times '' where nothing is known of such a job; {others, ''} where it
-- is of another owner.
local tenant, dry_run, keep_ms = ARGV[1], ARGV[2], ARGV[3] -- tenant '' for none; dry_run '1': it learns nothing
local owner, others = ARGV[4], ARGV[5] -- owner '' for any
local known = redis.call('HMGET', KEYS[1], 'tenant', 'task', 'checkpoint', 'owner')
if owner ~= '' and (known[4] or '') ~= owner and redis.call('EXISTS', KEYS[1]) == 1 then
  return {others, ''}
end
if (known[1] or '') ~= tenant and redis.call('EXISTS', KEYS[1]) == 1 then
  return {'', ''}
end
if not known[2] and dry_run == '0' then
  redis.call('HSET', KEYS[2], 'children', '')
  redis.call('PEXPIRE', KEYS[2], keep_ms)
end
return {known[2] or '', known[3] or ''}
