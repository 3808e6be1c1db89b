"""The ClickHouse engine in a process of its own, behind ClickHouse's HTTP interface.

It answers what clickhouse-connect, ClickHouse's JavaScript client, Grafana and curl send. Features beyond that, such as
sessions, external tables and KILL QUERY, are refused (501) with the advice to use a real server.
"""
