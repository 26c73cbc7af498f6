"""Do the tasks of a plan, in one pass, or two for a shuffle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from penstock.preparation._committed import CommittedTask
from penstock.preparation._conversion import ConversionJob
from penstock.preparation._engines import Workforce
from penstock.preparation._outlets import Target
from penstock.preparation._plan import RunPlan
from penstock.preparation._shuffle import GatherJob, plan_gathering
from penstock.preparation._skipping import merge_examples, sum_counts
from penstock.preparation._task_record import TaskRecord
from penstock.preparation._tasks import Task, paths_of
from penstock.preparation._work_folder import WorkFolder
from penstock.shards import Runs, SplitOrigin
from penstock.sources import Split


def run_tasks(
    plan: RunPlan, work: WorkFolder, workforce: Workforce, others: Sequence[RunPlan] = ()
) -> list[CommittedTask]:
    """Do the tasks that are left, and return all new tasks with what they made.

    If the dataset is split, `others` are the plans of the other parts: tasks that they share make their samples, too.
    """
    if not plan.tasks:
        return []
    _sweep(plan, work)
    is_shuffled = plan.specification.shuffle is not None
    records = _convert(plan, others, workforce, "deal" if is_shuffled else "prepare")
    made = [_to_committed(task, record) for task, record in zip(plan.tasks, records, strict=True)]
    return [_merge(made, _gather(plan, work, workforce, records))] if is_shuffled else made


def _sweep(plan: RunPlan, work: WorkFolder) -> None:
    """Remove the results of tasks that are not part of this run, of either pass."""
    kept = list(plan.finished.values())
    if plan.specification.shuffle is not None and not plan.left:
        dealt = [plan.finished[task.key] for task in plan.tasks]
        buckets = plan_gathering(work, plan.specification, dealt)
        kept += work.records(bucket.key for bucket in buckets).values()
    work.sweep(kept)


def _convert(plan: RunPlan, others: Sequence[RunPlan], workforce: Workforce, stage: str) -> list[TaskRecord]:
    """Read, transform and write what is left of the plan."""
    job = ConversionJob(
        target=Target(destination=plan.destination, specification=plan.specification),
        others=tuple(Target(destination=each.destination, specification=each.specification) for each in others),
        transform=plan.transform,
        reading=plan.reading,
        on_error=plan.settings.on_error,
        max_skipped=plan.settings.most_skipped_rows,
    )
    finished = dict(plan.finished)
    workforce.execute(stage, job, _with_keys_of(others, plan.tasks), finished, plan.skipped)
    return [finished[task.key] for task in plan.tasks]


def _with_keys_of(others: Sequence[RunPlan], tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each with the keys of the tasks of other plans that read the same."""
    keys = [{(task.splits, task.first_split): task.key for task in plan.left} for plan in others]
    return [
        dataclasses.replace(task, keys_of_others=tuple(known.get((task.splits, task.first_split)) for known in keys))
        for task in tasks
    ]


def _gather(plan: RunPlan, work: WorkFolder, workforce: Workforce, dealt: Sequence[TaskRecord]) -> list[TaskRecord]:
    """The second pass of a shuffle."""
    buckets = plan_gathering(work, plan.specification, dealt)
    finished = work.records(bucket.key for bucket in buckets)
    job = GatherJob(destination=plan.destination, specification=plan.specification)
    workforce.execute("gather", job, buckets, finished, {})
    return [finished[bucket.key] for bucket in buckets]


def _to_committed(task: Task, record: TaskRecord) -> CommittedTask:
    pairs = zip(task.splits, record.splits, strict=True)
    return CommittedTask(
        splits=tuple(_origin_of(split, num_samples, rows) for split, (num_samples, rows) in pairs),
        shards=record.shards,
        skipped=record.skipped,
        examples=record.examples,
        noticed=record.noticed,
    )


def _origin_of(split: Split, num_samples: int, rows: Runs) -> SplitOrigin:
    return SplitOrigin(paths_of(split), bool(split.paths), split.begin, split.end, num_samples, rows)


def _merge(dealt: Sequence[CommittedTask], gathered: Iterable[TaskRecord]) -> CommittedTask:
    """A shuffled dataset as one task: every shard holds something of every split."""
    return CommittedTask(
        splits=tuple(split for task in dealt for split in task.splits),
        shards=tuple(shard for record in gathered for shard in record.shards),
        skipped=sum_counts(task.skipped for task in dealt),
        examples=tuple(merge_examples(example for task in dealt for example in task.examples)),
        noticed=sum_counts(task.noticed for task in dealt),
    )
