"""Why training waits, and what would help: found by experiment, not by prediction.

    penstock doctor -- train.py
      run_script   the script in processes of its own, watched from outside                _command, _run
        entered    a Python process that imports torch's DataLoader, which is hooked       _injected, _hooks
        timed      sample, collate, pack, unpack: events and facts, in files of one folder _probes, _recorder
        served     the script iterates over our loop, over the source that has its turn    _training_loop, _sources
        conducted  some steps of the baseline, turns of trials, then a stop                _conductor, _turns, _trials
          decided  what to try, whose turn is next, when it is over: pure                  _remedies, _experiment
          agreed   with the other ranks: a turn begins, and all stop, at the same step     _board, _stopping
      diagnose     the folder, readable after any death -> figures -> findings             _recording, _case, _diagnosis
      make_page    for `report` to draw                                                    _page

May import: `errors`, `filesystem`, `machine`, `pytorch`, `report`, `tuning`, `watching`. Imported by: `cli`.
Holds state: in a script under the doctor, the loaders that it made.
"""

from penstock.doctor._diagnosis import Diagnosis, diagnose
from penstock.doctor._page import make_page
from penstock.doctor._recording import make_excerpt, read_excerpt
from penstock.doctor._run import DoctorSettings, recording_folder, run_script

__all__ = [
    "Diagnosis",
    "DoctorSettings",
    "diagnose",
    "make_excerpt",
    "make_page",
    "read_excerpt",
    "recording_folder",
    "run_script",
]
