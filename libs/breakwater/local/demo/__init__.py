"""`breakwater demo`: the whole plane at work on this machine, and three ledgers compared."""
