"""A job: the user's two functions that are measured, from a file or from a call; and one turn of it.

A turn is a fresh loader, some steps that are not counted, and some that are:

             start      warm-up            counted
    make_loader ── first batch ── step … │ wait, step, wait, step, … │ close
                                         └ clocks, CPU time ─────────┘ memory

A turn starts like a run, so no loader profits from a queue that it filled during other turns, and none computes during
the turn of another. If an epoch ends within a turn, the next one starts, and the time for that counts: that is what
`persistent_workers` is for.
"""

import dis
import importlib.util
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from penstock.filesystem import similar_path
from penstock.machine import process_tree
from penstock.tuning._arms import check_space

MakeLoader = Callable[..., Iterable[Any]]
TrainStep = Callable[[Any], Any]

_PACKAGE = str(Path(__file__).parents[1])
_FUNCTIONS = ("make_loader", "train_step")
NO_BATCHES = "make_loader() returned a loader without batches: there is nothing to measure."
_LEAST_WARM_UP = 2
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
        for name in _FUNCTIONS:
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
    text = path.read_text(errors="replace") if path.suffix == ".py" and path.is_file() else "import *"
    if "import *" not in text:  # with it, the functions may come from another file
        # A training script that was meant for the doctor: importing it would start the training.
        _refuse_without(path, [name for name in _FUNCTIONS if name not in text])
    module = _import(path)
    _refuse_without(path, [name for name in _FUNCTIONS if not callable(getattr(module, name, None))])
    space = getattr(module, "SPACE", None)
    return TrainingJob(make_loader=module.make_loader, train_step=module.train_step, space=space, name=path.name)


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


class EmptyLoader(ValueError):
    """A loader without batches."""


class Measured(NamedTuple):
    """What a turn took. Seconds and sums are those of the counted steps."""

    num_steps: int
    seconds: float
    waits: tuple[float, ...]
    """Time in `next()`, for each step."""
    steps: tuple[float, ...]
    first_batch_seconds: float
    """From making the loader to its first batch."""
    wait_cpu_seconds: float
    """CPU time of the training process in `next()`."""
    step_cpu_seconds: float
    """CPU time of the training process in the steps."""
    cpu_seconds: float
    """CPU time of the training process and its workers."""
    memory_bytes: float | None
    """Memory at the end; shared pages count once, if the kernel says which."""

    @property
    def rate(self) -> float:
        return self.num_steps / max(self.seconds, 1e-9)

    @property
    def loading_seconds(self) -> float:
        """Mean wait for a batch."""
        return sum(self.waits) / max(1, self.num_steps)

    @property
    def cores(self) -> float:
        """CPU time, in processors."""
        return self.cpu_seconds / max(self.seconds, 1e-9)


def warm_up_steps(num_workers: int) -> int:
    """Steps until each worker has delivered its first batch, and start-up is over."""
    return max(_LEAST_WARM_UP, num_workers)


def take_turn(loader: Iterable[Any], train_step: TrainStep, *, num_steps: int, warm_up: int, begun: float) -> Measured:
    """Run some steps and measure all except the warm-up; making the loader started at `begun`.

    Raises:
        EmptyLoader: there are no batches.
        Exception: what the loader or the step raises.
    """
    batches = _endless(loader)
    batch = next(batches)
    first_batch = time.perf_counter() - begun
    for number in range(warm_up):
        train_step(batch)
        batch = next(batches) if number < warm_up - 1 else None
    _synchronize()
    waits: list[float] = []
    steps: list[float] = []
    wait_cpu = step_cpu = 0.0
    children_before, start = _cpu_of_children(), time.perf_counter()
    asked, asked_cpu = start, time.process_time()
    for _ in range(num_steps):
        batch = next(batches)
        got, got_cpu = time.perf_counter(), time.process_time()
        train_step(batch)
        if len(steps) == num_steps - 1:
            _synchronize()
        waits.append(got - asked)
        wait_cpu += got_cpu - asked_cpu
        asked, asked_cpu, before, before_cpu = time.perf_counter(), time.process_time(), got, got_cpu
        steps.append(asked - before)
        step_cpu += asked_cpu - before_cpu
    seconds = asked - start
    cpu = wait_cpu + step_cpu + _cpu_of_children() - children_before
    tree = process_tree(os.getpid(), with_pss=True)
    memory = float(sum(each.rss_bytes if each.pss_bytes is None else each.pss_bytes for each in tree))
    return Measured(
        num_steps, seconds, tuple(waits), tuple(steps), first_batch, wait_cpu, step_cpu, cpu, memory if tree else None
    )


def close_loader(loader: Any) -> None:
    """Close a loader, and with it its workers."""
    close = getattr(loader, "close", None)
    if callable(close):
        close()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    num_batches = 0
    while True:
        num_before = num_batches
        for batch in loader:
            num_batches += 1
            yield batch
        if not num_batches:
            raise EmptyLoader(NO_BATCHES)
        if num_batches == num_before:
            raise EmptyLoader(
                f"make_loader() returned a loader that ends after batch {num_batches:,} and cannot start again (a "
                "generator?). Return one that can be iterated over again, or that has more batches."
            )


def _synchronize() -> None:
    """Wait for what the step has only queued on the accelerator."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _cpu_of_children() -> float:
    """CPU seconds of this process's descendants; the kernel counts in ticks of 10 ms."""
    return sum(each.cpu_seconds for each in process_tree(os.getpid())[1:])
