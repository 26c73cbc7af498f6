"""The first code of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys

from penstock.workers._entry import hold_life_line


def test_a_life_line_that_was_cut_before_it_was_held_ends_the_process() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    pid = os.fork()
    if pid == 0:
        hold_life_line(reader)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reader)


def test_the_first_code_of_a_process_imports_only_the_standard_library() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='probe');"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'numpy', 'penstock', 'torch'}))"
    )
    path = hold_life_line.__code__.co_filename
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
