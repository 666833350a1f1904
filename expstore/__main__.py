"""Run the command line: as `expstore`, and as `python -m expstore`."""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command given by this process's arguments, and exit."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # otherwise the process ignores Ctrl-C, as with nohup
        # Nothing has begun: Ctrl-C ends the process without the traceback of an import.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from expstore.cli.app import main as run

    signal.signal(signal.SIGINT, former)
    run()


if __name__ == "__main__":
    main()
