"""What every step of a training loop waits for: `penstock.watch` around any loader.

    for batch in penstock.watch(loader): …
      _watch      a row of figures for each step, and what the loader says about itself
      _summary    the rows, in bounded memory; words and numbers                  -> watched.summary()
                  the same for TensorBoard, W&B, MLflow: one callable             -> log=
      _page       lanes, waits, processors and memory                             -> to_html, to_perfetto

May import: `errors`, `filesystem`, `machine`, `report`. Imported by: `doctor`. Holds no state.
"""

from penstock.watching._page import machine_facts, usage_charts
from penstock.watching._summary import WatchSummary
from penstock.watching._watch import gauge_of, watch

__all__ = ["WatchSummary", "gauge_of", "machine_facts", "usage_charts", "watch"]
