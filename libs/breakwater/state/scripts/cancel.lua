-- Leaves a request to cancel an execution, for whoever has it or takes it; the first of each who gives one stands.
-- KEYS: the cancel requests for the execution
-- Returns the request that holds.
local who, request, keep_ms = ARGV[1], ARGV[2], ARGV[3]
redis.call('HSETNX', KEYS[1], who, request)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return redis.call('HGET', KEYS[1], who)
