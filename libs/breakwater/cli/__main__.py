"""The command `breakwater`, also as `python -m breakwater.cli`."""

import signal
import sys


def main() -> int:
    """Entry point of the process. The kernel handles SIGINT until a command begins; after its end, it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from breakwater.cli.main import main as command

    try:
        return command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
