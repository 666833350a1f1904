"""Run the command line: as `expstore`, and as `python -m expstore`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command given by this process's arguments, and exit."""
    # A shell lets its background jobs ignore Ctrl-C: they go on doing so.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # nothing has begun: Ctrl-C ends the process without the traceback of an import
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from expstore.cli.app import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
