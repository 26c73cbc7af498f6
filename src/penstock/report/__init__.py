"""How measurements and descriptions look: data first, then words, tables and bars.

Renders for the terminal; knows nothing of where the data comes from.

May import: nothing. Imported by: `cli`, `plan`. Holds no state.
"""

from penstock.report._histogram import Histogram, histogram
from penstock.report._terminal import console, print_json, progress_bar
from penstock.report._units import format_bytes, format_count

__all__ = [
    "Histogram",
    "console",
    "format_bytes",
    "format_count",
    "histogram",
    "print_json",
    "progress_bar",
]
