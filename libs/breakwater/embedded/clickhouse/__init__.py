"""The ClickHouse engine in a process of its own, behind ClickHouse's HTTP interface.

`errors` what goes wrong and its HTTP status, `sql` what a request's text asks for, `codec` and `blocks` compression,
`handle` and `engine` chdb and its threads, `request`, `body` and `answer` the parts of an exchange, `sessions` what
outlives it, `http` the protocol, `__main__` the process.
"""
