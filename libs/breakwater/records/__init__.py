"""The record in ClickHouse: its tables, messages as rows and rows as messages, and queries."""
