"""The search for the best settings: pure functions over measured arms. Nothing here runs a loader.

    space -> arms_of -> choose_racers(look)      a model ranks the arms
                          | which arm is next
                        race                     turns of measured rates, until the difference is beyond noise
                          | leader, cheapest_within_noise
                        format_settings          penstock-settings.toml, which `read_settings` reads

    stretch of steps -> OnlineTuner -> Decision  while training runs: what to change, and why

`trials` runs the turns, `pytorch` measures the stretches. A rate is what should be high: batches or samples per second.

May import: `errors`, `filesystem`. Imported by: `cli`, `diagnosis`, `pytorch`, `trials`. Holds no state.
"""

from penstock.tuning._arms import (
    Options,
    arms_of,
    check_space,
    default_space,
    key_of,
    name_of,
    num_workers_of,
    simplify,
)
from penstock.tuning._model import Look
from penstock.tuning._online import Bounds, Decision, OnlineTuner, Setting, Stretch
from penstock.tuning._race import ROUNDS, Turn, cheapest_within_noise, compare, leader_of, student_quantile
from penstock.tuning._search import search
from penstock.tuning._settings_file import FILE_NAME, SettingsFile, format_settings, read_settings

__all__ = [
    "FILE_NAME",
    "ROUNDS",
    "Bounds",
    "Decision",
    "Look",
    "OnlineTuner",
    "Options",
    "Setting",
    "SettingsFile",
    "Stretch",
    "Turn",
    "arms_of",
    "cheapest_within_noise",
    "check_space",
    "compare",
    "default_space",
    "format_settings",
    "key_of",
    "leader_of",
    "name_of",
    "num_workers_of",
    "read_settings",
    "search",
    "simplify",
    "student_quantile",
]
