"""Run a job for a while and measure it: by itself (`bench`), and with settings in turns (`tune`).

    TrainingJob            make_loader(**options), train_step(batch): from a file or a call
      | take_turn  a fresh loader, some steps, measured
    bench          the loader alone, with a step that waits, with the real step -> Bench: table, shares of the limit
    tune           `tuning.search` says which arm is next -> Tuned: table, best, cheapest, settings file

This room measures, `tuning` judges, `report` draws.

May import: `errors`, `filesystem`, `metrics`, `plan`, `pytorch`, `report`, `tuning`, `workers`. Imported by: `cli`.
Holds no state.
"""

from penstock.trials._bench import bench_job, bench_plan
from penstock.trials._job import job_traceback, load_job
from penstock.trials._tune import TuneSettings, tune
from penstock.trials._turns import take_turn

__all__ = [
    "TuneSettings",
    "bench_job",
    "bench_plan",
    "job_traceback",
    "load_job",
    "take_turn",
    "tune",
]
