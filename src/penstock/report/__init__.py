"""How measurements and descriptions look: data first, then words, tables and bars.

    data (a Histogram, a count of bytes, progress) -> the terminal, or JSON
    a Page: verdict, findings, lanes, charts       -> the terminal, one HTML file, a Perfetto trace

One file per medium; the trace, and how numbers are written, are beside the page. Knows nothing of where the data comes
from; what is slow to import (numpy, rich) is imported only when needed, so that `penstock --help` does not wait.

May import: `errors`. Imported by: `cli`, `dataset`, `doctor`, `loader`, `plan`, `preparation`, `tuning`, `watching`.
Holds no state.
"""

from penstock.report._html import render_html
from penstock.report._page import (
    Arm,
    Chart,
    Fact,
    FigureLine,
    FigureTable,
    Finding,
    Gain,
    Headline,
    Histogram,
    Lane,
    Line,
    Page,
    SlowSample,
    Span,
    SpanKind,
    StepTimes,
    Tone,
    align_figures,
    format_bytes,
    format_gain,
    format_number,
    format_seconds,
    histogram,
    to_perfetto,
)
from penstock.report._terminal import console, print_json, progress_bar, render_terminal, stop_printing

__all__ = [
    "Arm",
    "Chart",
    "Fact",
    "FigureLine",
    "FigureTable",
    "Finding",
    "Gain",
    "Headline",
    "Histogram",
    "Lane",
    "Line",
    "Page",
    "SlowSample",
    "Span",
    "SpanKind",
    "StepTimes",
    "Tone",
    "align_figures",
    "console",
    "format_bytes",
    "format_gain",
    "format_number",
    "format_seconds",
    "histogram",
    "print_json",
    "progress_bar",
    "render_html",
    "render_terminal",
    "stop_printing",
    "to_perfetto",
]
