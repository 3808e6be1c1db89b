"""The decisions, pure: values in, values out. No I/O, no clock, no randomness: those are arguments."""
