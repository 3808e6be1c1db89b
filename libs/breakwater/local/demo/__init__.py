"""`breakwater demo`: runs the whole plane on this machine under faults, and compares three ledgers."""
