"""The command `penstock`, and `python -m penstock`: a program that Ctrl-C ends without a traceback, at any time.

An interrupt can come while modules are being imported, where C code makes an ImportError of it; so it is noted, and
whatever comes of it counts as interrupted.
"""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False  # as in penstock/__init__.py
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def run() -> NoReturn:
    """Run the command, and end this process with its exit code; 130 if it was interrupted."""
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
            signal.signal(signal.SIGINT, note)
        if "penstock._version" not in sys.modules:  # our `__init__.py` imports it
            from penstock._version import NAMESAKE

            sys.exit(f"penstock: {NAMESAKE}")
        from penstock.cli import main

        code = main()
    except BaseException:
        if not interrupts:
            raise
        sys.stderr.write("penstock: interrupted\n")
        code = 130
    if signal.getsignal(signal.SIGINT) is note:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: Python would show where it is leaving
    sys.exit(code)


if __name__ == "__main__":
    run()
