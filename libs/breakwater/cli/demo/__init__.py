"""`breakwater demo`: the whole plane at work on this machine, and its books compared."""
