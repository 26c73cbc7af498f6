"""How work gets to processes that share nothing with the trainer."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from penstock.loader import _worker
from penstock.loader._work import Work


def check_not_importing_main() -> None:
    if _worker.is_importing_main:
        raise RuntimeError(
            "This script starts worker processes while a worker imports it, because a mapped function lives in it. "
            "Put the training loop under `if __name__ == '__main__':`, or the function into a module of its own."
        )


def pack_work(work: Work) -> tuple[Any, ...]:
    try:
        pickled = pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"What worker processes are to do cannot be sent to them: {error}. Put functions and classes at the top "
            "of a module, or let them be forked: start_method='fork' for a plan, multiprocessing_context='fork' for a "
            "torch dataset. A plan may also use workers='thread' with @penstock.pure."
        ) from error
    return "work", {"sys_path": list(sys.path)} | (_where_main_is() if b"__main__" in pickled else {}), pickled


def _where_main_is() -> dict[str, str]:
    """How a worker imports the user's script, in the words of `multiprocessing.spawn.prepare`."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):  # "<stdin>"
        raise TypeError(
            "A function or class lives in a notebook or an interactive session, where worker processes cannot find it. "
            "Put it into a module, or let workers be forked: start_method='fork' for a plan, "
            "multiprocessing_context='fork' for a torch dataset. "
            "A plan may also use workers='thread' with @penstock.pure."
        )
    return {"init_main_from_path": os.path.abspath(path)}
