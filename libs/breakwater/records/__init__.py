"""ClickHouse: the tables, how messages become rows and rows become messages, and the questions people ask."""
