"""Every question, or those whose numbers or names are given; then the page.

make bench-peers                   about half an hour on two cores
make bench-peers QUESTION=1        or "1 5", or windows
"""

from __future__ import annotations

import subprocess
import sys

from _page import QUESTIONS, draw_all
from _turns import HERE

if __name__ == "__main__":
    failed = []
    for number, name in enumerate(QUESTIONS, 1):
        asked = not sys.argv[1:] or {str(number), name} & set(sys.argv[1:])
        if asked and subprocess.run([sys.executable, HERE / f"{name}.py"], check=False).returncode:
            failed.append(name)
    draw_all()
    sys.exit(f"These ended with an error: {', '.join(failed)}." if failed else 0)
