-- Reads everything that is counted, as of one moment.
-- KEYS: filled, reservations, applied blocks..., periods...
-- Returns {filled, reservations, blocks in hexadecimal..., periods...}; hashes as fields and values in turn.
local blocks = tonumber(ARGV[1])
local hex = {}
for byte = 0, 255 do
  hex[string.char(byte)] = string.format('%02x', byte)
end
local answer = {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
for k = 3, #KEYS do
  if k - 2 <= blocks then
    local bits = redis.call('GET', KEYS[k]) or ''
    answer[k] = string.gsub(bits, '.', hex)
  else
    answer[k] = redis.call('HGETALL', KEYS[k])
  end
end
return answer
