-- Leaves an order to cancel an execution, for whoever has it or takes it; the first of each who gives one stands.
-- KEYS: the orders of the execution
-- Returns the order that stands.
local who, order, keep_ms = ARGV[1], ARGV[2], ARGV[3]
redis.call('HSETNX', KEYS[1], who, order)
redis.call('PEXPIRE', KEYS[1], keep_ms)
return redis.call('HGET', KEYS[1], who)
