"""The ClickHouse engine in a process of its own, behind ClickHouse's HTTP interface.

`errors` what goes wrong and its HTTP status, `sql` what a request's text asks for, `codec` compression, `engine` chdb
and its threads, `request` a request as a value, `http` the protocol, `__main__` the process.
"""
