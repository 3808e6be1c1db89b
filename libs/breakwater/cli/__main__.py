"""The entry point of the command `breakwater`, and of `python -m breakwater.cli`."""

import gc
import signal
import sys


def main() -> int:
    """Runs the command. The kernel's default applies to SIGINT until a subcommand begins; afterwards it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(50_000)  # with Python's default, collections take a tenth of a command's start
    from breakwater.cli.main import main as command

    try:
        return command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
