"""Findings about workers: none, too few, too many, needless, of the wrong kind, started too often, too large.

Each is a pure function from a case to one finding, or to none; `_diagnosis.FINDINGS` sets their order.
"""

from __future__ import annotations

from penstock.doctor._case import Case, is_about_workers, percent
from penstock.report import Finding, format_bytes, format_seconds


def no_workers(case: Case) -> Finding | None:
    """The training loop makes its batches itself."""
    found, stages = case.best(is_about_workers), case.stages
    if found is None or not case.waits_for_data or case.options["num_workers"] > 0 or case.loader["is_plan"]:
        return None
    return case.advise(
        found,
        id="no-workers",
        title="The training loop makes its batches itself",
        evidence=(
            f"num_workers=0: each step waits {format_seconds(stages.wait)} for its batch, and computes for "
            f"{format_seconds(stages.step)}.",
            f"A sample takes {format_seconds(stages.sample)}, {percent(stages.cpu_share)} of it on a processor.",
        ),
        price=case.price_of_workers(found.trial),
    )


def few_workers(case: Case) -> Finding | None:
    """Workers do not keep up, and more of them do."""
    workers = case.options["num_workers"]
    found = case.best(lambda trial: trial.changes.get("num_workers", 0) > workers)
    if found is None or not case.waits_for_data or workers == 0:
        return None
    return case.advise(
        found,
        id="few-workers",
        title=f"{workers} worker{'s do' if workers > 1 else ' does'} not keep up",
        evidence=(
            f"A batch takes {format_seconds(case.stages.fetch)} to make, a step {format_seconds(case.stages.step)}.",
        ),
        price=case.price_of_workers(found.trial),
    )


def too_many_workers(case: Case) -> Finding | None:
    """More workers than cores, and fewer are faster."""
    workers = case.options["num_workers"]
    found = case.best(lambda trial: 0 < trial.changes.get("num_workers", workers) < workers)
    if found is None or workers <= case.cores:
        return None
    return case.advise(
        found,
        id="too-many-workers",
        title=f"{workers} workers are too many for {case.cores} cores",
        evidence=(
            f"A batch takes {format_seconds(case.stages.fetch)} to make: {format_seconds(case.stages.fetch_cpu)} of it "
            f"computing, {format_seconds(case.stages.fetch_delay)} ready to run and without a core.",
            f"The training thread was ready but had no core for {format_seconds(case.stages.delay)} of each step.",
        ),
        price="none; it frees memory",
    )


def needless_workers(case: Case) -> Finding | None:
    """Batches take longer to hand over than to make."""
    workers, stages = case.options["num_workers"], case.stages
    found = case.best(lambda trial: trial.changes.get("num_workers") == 0)
    if found is None or not workers or case.loader["is_plan"]:
        return None
    return case.advise(
        found,
        id="needless-workers",
        title="Workers hand batches over for longer than it takes to make them",
        evidence=(
            f"A batch takes {format_seconds(stages.making)} to make, and each step waits {format_seconds(stages.wait)} "
            "for one: the rest of the wait is its way here from another process.",
        ),
        price="none; it frees memory",
    )


def threads_share_one_lock(case: Case) -> Finding | None:
    """Threads of the trainer compute with Python, one at a time."""
    found = case.best(lambda trial: trial.changes.get("workers") == "process")
    if found is None or not case.waits_for_data or case.loader["workers"] not in ("thread", "inline"):
        return None
    return case.advise(
        found,
        id="gil-threads",
        title="Python code in the trainer's threads runs one thread at a time",
        evidence=(
            f"{case.options['num_workers']} threads of the training process make the batches; they and the training "
            "loop share one interpreter lock. Worker processes have a lock each.",
            f"A batch takes a thread {format_seconds(case.stages.fetch)}, of which "
            f"{format_seconds(case.stages.fetch_cpu)} are computing.",
        ),
        price="memory for each worker process",
    )


def workers_restart(case: Case) -> Finding | None:
    """Epochs are short, and each starts its workers again."""
    found = case.best(lambda trial: list(trial.changes) == ["persistent_workers"])
    if found is None or not case.waits_for_data:
        return None
    length = case.loader["length"]
    return case.advise(
        found,
        id="workers-restart",
        title="Workers are restarted for each short epoch",
        evidence=(
            f"An epoch of {length} steps takes {format_seconds(length * (case.stages.step + case.stages.wait))}"
            f" of steps, and {format_seconds(case.stages.start)} more before its first batch is there.",
        ),
        price="workers keep their memory between epochs",
    )


def torch_threads(case: Case) -> Finding | None:
    """Torch's threads in the trainer and the workers want the same cores."""
    found = case.best(lambda trial: trial.kind == "threads")
    if found is None:
        return None
    threads = (case.recording.leader or {}).get("num_threads", 0)
    return case.advise(
        found,
        id="torch-threads",
        title="Torch's threads and the workers compete for cores",
        evidence=(
            f"{threads} threads of the trainer and {case.options['num_workers']} workers share {case.cores} cores; the "
            f"training thread waited {format_seconds(case.stages.delay)} of each step for one.",
        ),
        change=found.trial.name,
        price="none",
    )


def growing_workers(case: Case) -> Finding | None:
    """Each worker makes copies of pages that it should share."""
    first, last = case.worker_memory
    workers = case.options["num_workers"]
    is_forked = case.loader["context"] in (None, "fork")
    if not workers or not is_forked or case.worker_growth <= 0:
        return None
    return Finding(
        id="growing-workers",
        title="Workers copy the dataset little by little",
        evidence=(
            f"A worker's own memory grew from {format_bytes(first)} to {format_bytes(last)}, by "
            f"{format_bytes(case.worker_growth)} per second; there are {workers}.",
            "Reading a Python object changes its reference count, and the page that was shared becomes a copy.",
        ),
        change="keep samples in arrays (numpy, Arrow, penstock.from_arrays), not in lists and dicts of Python objects",
        where=case.loader["where"],
        price="none; it saves a copy of the dataset per worker",
        link="docs/guide/map-datasets.md#if-it-fits-in-memory-keep-it-there",
    )
