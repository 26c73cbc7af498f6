"""Which settings are best, by running the job: `bench` measures it, `tune` races settings, `advise` reads sizes.

    TrainingJob            make_loader(**options), train_step(batch): from a file or a call
      | take_turn          a fresh loader, some steps, measured
    bench                  the loader alone, with a step that waits, with the real step -> Bench: shares of the limit
    tune                   `search` says which arm is next -> Tuned: table, best, cheapest, settings file
      space -> arms_of -> choose_racers(look)      a model ranks the arms
                        race                       turns of measured rates, until the difference is beyond noise
                          | leader, cheapest_within_noise
    advise                 does the data fit, map it or stream it, which shuffle, what the first epoch costs

Judging is pure (`_arms`, `_race`); measuring is not. A rate is batches or samples per second: higher is better.
`Comparison.of` is how this house compares two settings: paired log ratios, and the interval of their mean.

May import: `dataset`, `errors`, `filesystem`, `loader`, `machine`, `plan`, `pytorch`, `report`, `shards`. Imported
by: `cli`, `doctor`. Holds no state.
"""

from penstock.tuning._advise import advise
from penstock.tuning._arms import (
    Look,
    Options,
    arms_of,
    check_space,
    choose_racers,
    default_space,
    key_of,
    name_of,
    predict,
)
from penstock.tuning._bench import bench_job, bench_plan
from penstock.tuning._job import job_traceback, load_job, take_turn
from penstock.tuning._race import (
    Comparison,
    Turn,
    cheapest_within_noise,
    compare,
    leader_of,
    race,
    search,
)
from penstock.tuning._tune import TuneSettings, tune

__all__ = [
    "Comparison",
    "Look",
    "Options",
    "TuneSettings",
    "Turn",
    "advise",
    "arms_of",
    "bench_job",
    "bench_plan",
    "cheapest_within_noise",
    "check_space",
    "choose_racers",
    "compare",
    "default_space",
    "job_traceback",
    "key_of",
    "leader_of",
    "load_job",
    "name_of",
    "predict",
    "race",
    "search",
    "take_turn",
    "tune",
]
