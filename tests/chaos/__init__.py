"""What is left of a plane's work after its parts were killed, stopped or cut off: `python -m tests.chaos --help`."""
