"""How measurements and descriptions look: data first, then words, tables and bars.

    data (a Histogram, a count of bytes, progress) -> the terminal, or JSON

One file per medium. Knows nothing of where the data comes from; what takes long to import (numpy, rich)
is imported when it is needed, so that `penstock --help` need not wait for it.

May import: `errors`. Imported by: `cli`. Holds no state.
"""

from penstock.report._histogram import Histogram, histogram
from penstock.report._terminal import console, format_bytes, print_json, progress_bar

__all__ = [
    "Histogram",
    "console",
    "format_bytes",
    "histogram",
    "print_json",
    "progress_bar",
]
