"""Why training waits, and what would help: found by experiment, not by prediction.

    penstock doctor -- train.py
      run        the script in processes of its own, watched from outside            _run, _usage
      hooks      in every process of it: clocks around stages, loops that can be swapped    _injected, _hooks, _probes
      conductor  look, turns, stop: effects                          _conductor, _turns, _trials, _sources, _board
      experiment whose turn is next, gains and errors; what to try: pure             _experiment, _remedies
      recording  what is left in a folder after any death -> figures -> findings -> page    _recording, _findings, _page

May import: `filesystem`, `metrics`, `pytorch`, `report`, `watching`, `workers`. Imported by: `cli`. Holds state: in a
script under the doctor, the loaders that it made.
"""

from penstock.diagnosis._diagnosis import Diagnosis, diagnose
from penstock.diagnosis._excerpt import make_excerpt, read_excerpt
from penstock.diagnosis._page import make_page
from penstock.diagnosis._run import DoctorSettings, ScriptRun, recording_folder, run_script

__all__ = [
    "Diagnosis",
    "DoctorSettings",
    "ScriptRun",
    "diagnose",
    "make_excerpt",
    "make_page",
    "read_excerpt",
    "recording_folder",
    "run_script",
]
