"""Why training waits, and what would help: found by experiment, not by prediction.

An `Examination` lives in each training process, and alone decides which trial runs, where a loop of the script takes
its next batch from, and when it ends. Its `Leader`, on rank 0, sends each measured turn to `experiment`, a pure
generator that yields the next trial, and announces it on a board that all ranks read. Afterwards `diagnose` makes a
`Case` of the recording, and its findings are the rows of a table of causes that the case shows and a trial helped.

    penstock doctor -- train.py
      run_script     the script in processes of its own, watched from outside            _run
        entered      a Python process that imports torch's DataLoader, which is hooked   _injected, _hooks
        timed        sample, collate, pack, unpack: events and facts, in files           _probes, _recording
        examined     the batches of a loop come from the trial that runs                 _examination
          supplied   by the script's iterator, memory, or a rebuilt loader               _supplies, _trial_loaders
          led        turns are measured, the next one is announced, all ranks stop       _turns, _stopping
          decided    what to try, which is next, when it is over: pure                   _remedies, _experiment
      diagnose       the recording -> costs of a batch -> findings                       _case, _findings, _diagnosis
      make_page      for `report` to draw                                                _diagnosis

May import: `errors`, `filesystem`, `machine`, `pytorch`, `report`, `tuning`, `watching`. Imported by: `cli`.
Holds state: in a script under the doctor, the loaders that it made.
"""

from penstock.doctor._diagnosis import Diagnosis, diagnose, make_page
from penstock.doctor._examination import Examination
from penstock.doctor._experiment import (
    AS_IS,
    REPLAY,
    Trial,
    TurnResult,
    affordable_trials,
    compare_with_baseline,
    experiment,
)
from penstock.doctor._hooks import watch_torch
from penstock.doctor._loaders import ScriptLoader
from penstock.doctor._recording import Recorder, Recording, read_recording
from penstock.doctor._remedies import choose_trials
from penstock.doctor._run import (
    DoctorSettings,
    ScriptRun,
    Usage,
    command_of,
    environment,
    recording_folder,
    run_script,
)
from penstock.doctor._supplies import GroupedSupply, IteratorSupply
from penstock.doctor._trial_loaders import rebuild
from penstock.doctor._turns import TurnClock, TurnClocks

__all__ = [
    "AS_IS",
    "REPLAY",
    "Diagnosis",
    "DoctorSettings",
    "Examination",
    "GroupedSupply",
    "IteratorSupply",
    "Recorder",
    "Recording",
    "ScriptLoader",
    "ScriptRun",
    "Trial",
    "TurnClock",
    "TurnClocks",
    "TurnResult",
    "Usage",
    "affordable_trials",
    "choose_trials",
    "command_of",
    "compare_with_baseline",
    "diagnose",
    "environment",
    "experiment",
    "make_page",
    "read_recording",
    "rebuild",
    "recording_folder",
    "run_script",
    "watch_torch",
]
