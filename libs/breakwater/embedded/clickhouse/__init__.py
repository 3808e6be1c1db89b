"""The ClickHouse engine in a process of its own, behind ClickHouse's HTTP interface.

`errors` what goes wrong and its HTTP status, `access` who may do what, `request` a request as a value, `sql` where a
statement names a file, `engine` chdb and its threads, `http` the protocol, `__main__` the process.
"""
