"""A job: the user's two functions that are measured, from a file or from a call."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from penstock.filesystem import similar_path
from penstock.tuning._arms import check_space

MakeLoader = Callable[..., Iterable[Any]]
TrainStep = Callable[[Any], Any]

_PACKAGE = str(Path(__file__).parents[1])
_FUNCTIONS = ("make_loader", "train_step")
_SHAPE = """\
A job is a Python file with two functions:

    def make_loader(**options):        # num_workers, prefetch_factor, …
        return DataLoader(dataset, batch_size=64, **options)

    def train_step(batch):
        …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What to measure."""

    make_loader: MakeLoader
    """Called with options; returns a fresh loader."""
    train_step: TrainStep
    """Called with each batch."""
    space: Mapping[str, Any] | None = None
    """Options to try: `SPACE` in the file."""
    name: str = ""

    def __post_init__(self) -> None:
        if self.space is not None:
            check_space(self.space)
        for name in ("make_loader", "train_step"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a function.\n{_SHAPE}")
        try:
            inspect.signature(self.train_step).bind(None)
        except TypeError as error:
            raise TypeError(f"train_step must take one batch: {error}.\n{_SHAPE}") from None
        except ValueError:
            return  # a built-in function without a signature


def load_job(path: Path) -> TrainingJob:
    """The job in a Python file, whose folder is then on the path, as with `python JOB.py`.

    Raises:
        ValueError: it is not a Python file, cannot be imported, or lacks one of the two functions.
        TypeError: its step does not take a batch.
        FileNotFoundError: there is no such file.
    """
    _check_mentions(path)
    module = _import(path)
    _refuse_without(path, [name for name in _FUNCTIONS if not callable(getattr(module, name, None))])
    space = getattr(module, "SPACE", None)
    return TrainingJob(make_loader=module.make_loader, train_step=module.train_step, space=space, name=path.name)


def _check_mentions(path: Path) -> None:
    """Refuse a training script that was meant for the doctor before importing it, which would start the training."""
    text = path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else "import *"
    if "import *" not in text:  # with it, the functions may come from another file
        _refuse_without(path, [name for name in _FUNCTIONS if name not in text])


def _refuse_without(path: Path, missing: Sequence[str]) -> None:
    if missing:
        raise ValueError(f"{path} has no {' and no '.join(f'{name}()' for name in missing)}.\n{_SHAPE}")


def job_traceback(error: BaseException) -> str:
    """The traceback of an exception that a job raised, starting at the first line outside Penstock."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def describe_exit(error: SystemExit) -> str:
    """What a job said when it ended the process that measures it."""
    return f"it called sys.exit({'' if error.code is None else repr(error.code)})"


def ignores_batch(train_step: TrainStep) -> bool:
    """Whether a step's code never uses its batch, as far as can be told."""
    function = getattr(train_step, "__func__", train_step)
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    batch = names[1] if inspect.ismethod(train_step) and len(names) > 1 else next(iter(names), None)
    used = (each.argval for each in dis.get_instructions(code))  # from 3.13 on, an instruction may load two variables
    return batch is not None and all(batch not in (each if isinstance(each, tuple) else (each,)) for each in used)


def _import(path: Path) -> ModuleType:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a plan file (.toml), or a job.\n{_SHAPE}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.{similar_path(path)} {_SHAPE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file (.py).\n{_SHAPE}")
    sys.path.insert(0, str(path.parent.resolve()))
    sys.argv = [str(path)]  # a job that parses arguments finds none of this command's
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that workers find its classes by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported.\n{job_traceback(error)}") from error
    except SystemExit as error:
        raise ValueError(f"{path} cannot be imported: {describe_exit(error)}.") from error
    return module
