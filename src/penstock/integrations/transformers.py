"""The `Trainer` of transformers, with plans for datasets.

    from penstock.integrations.transformers import Trainer        # was: from transformers import Trainer

    Trainer(model, args, train_dataset=plan, eval_dataset=other_plan).train(resume_from_checkpoint=True)

Four things stand between a plan and a transformers model, and are done here:

- **Arguments.** A packed batch becomes what `masks.hugging_face_kwargs` says, so that no document sees another, and
  labels that the plan has shifted are shifted back, since these models shift them: `ModelLoader`.
- **Steps.** A plan's batch is a step of all processes together. The `Trainer` counts pieces of
  `per_device_train_batch_size`, so the two must agree, and a message says how.
- **Epochs.** To resume, the `Trainer` divides its steps by the length of the first epoch, and epochs of `tail="carry"`
  differ by a batch. So its epochs are loops of equally many steps (`DataLoader(plan, steps=...)`), which is exact.
- **Evaluation.** The `Trainer` averages the mean losses of batches, and packed rows are one line to it, so that a last
  batch of one row would count as much as a full one. Its loss becomes the mean over all targets of the plan, each once.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import transformers

from penstock.integrations.scalars import LoaderScalars
from penstock.masks import hugging_face_kwargs
from penstock.plan import Plan
from penstock.pytorch import DataLoader

_IGNORED = -100
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids")


class ModelLoader(DataLoader[dict[str, Any]]):
    """A `penstock.DataLoader` whose batches are the keyword arguments of a transformers model: `model(**batch)`.

    Takes a plan, and every option that `penstock.DataLoader` takes with one.
    """

    def __init__(self, plan: Plan, **options: Any) -> None:
        super().__init__(plan, **options)
        self.plan = plan
        # Accelerate builds a loader from this attribute when it skips batches, so the conversion has to be here.
        self.collate_fn = functools.partial(model_arguments, labels=plan.labels)

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Batches from where the state stands to the end of the loop."""
        return map(self.collate_fn, super().__iter__())


def model_arguments(
    batch: Mapping[str, Any], *, labels: Literal["next", "same"] | None, once: bool = False
) -> dict[str, Any]:
    """The batch of a plan as a transformers model takes it; `labels` as the plan has them.

    The last label of a row is of a token that is not in it, and these models have no place for that one. With `once`,
    rows that come twice in an epoch have labels only the first time.
    """
    arguments = dict(batch)
    if once and labels is not None and "is_repeated" in batch:
        arguments["labels"] = batch["labels"].masked_fill(batch["is_repeated"][:, None], _IGNORED)
    if labels == "next":
        arguments["labels"] = torch.nn.functional.pad(arguments["labels"], (1, 0), value=_IGNORED)[:, :-1]
    if "cu_seqlens" in arguments:
        return dict(hugging_face_kwargs(arguments))
    if labels is None:  # samples: they are the user's, and go as they are
        return arguments
    return {name: arguments[name] for name in _OF_TOKENS if name in arguments}


class TakesPlans(transformers.Trainer):
    """What a `Trainer` needs so that its datasets may be plans, or a `ModelLoader` for one with other options.

    A class of its own, so that other trainers can have it: `class Mine(TakesPlans, TheirTrainer)`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(_positional_names(super().__init__), args, strict=False)) | kwargs
        plans = {name: given[name] for name in ("train_dataset", "eval_dataset") if _has_plans(given.get(name))}
        super().__init__(
            *map(self._without_plans, args), **{name: self._without_plans(value) for name, value in kwargs.items()}
        )
        for name, value in plans.items():
            setattr(self, name, {**getattr(self, name), **value} if isinstance(value, dict) else value)
        self._data_scalars: LoaderScalars | None = None
        self._losses: list[torch.Tensor] | None = None

    def get_train_dataloader(self) -> Any:
        """The loader of the plan to train on, if it is one."""
        if not _is_plan(self.train_dataset):
            return super().get_train_dataloader()
        loader = self._as_loader(self.train_dataset, is_training=True)
        self._data_scalars = LoaderScalars(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of the plan to evaluate on, if it is one."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str):
            found = self.eval_dataset[found]
        return self._as_loader(found) if _is_plan(found) else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of the plan to predict, if it is one."""
        return self._as_loader(test_dataset) if _is_plan(test_dataset) else super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the framework does; the loss of a plan of tokens is the mean over its targets."""
        self._losses = [] if isinstance(dataloader, ModelLoader) and dataloader.plan.labels is not None else None
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        noted, self._losses = self._losses, None
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if noted and name in output.metrics:
            sums = torch.stack(noted).cpu().double().sum(dim=0).float()
            total, count = self.accelerator.reduce(sums.to(self.args.device))
            output.metrics[name] = (total / count).item()
        return output

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the framework does; in an evaluation it is the mean over this process's targets, and noted."""
        if self._losses is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        count = (inputs["labels"] != _IGNORED).sum()
        # Given a number of items, the framework may divide by that of all processes.
        found = super().compute_loss(model, inputs, return_outputs, None)
        loss = (found[0] if return_outputs else found).detach().mean().float()
        total = torch.where(count > 0, loss * count, 0)  # the mean over none is NaN
        self._losses.append(torch.stack([total, count.float()]))
        return found

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch."""
        if isinstance(dataloader, ModelLoader):
            return dataloader.plan.num_rows
        return int(super().num_examples(dataloader))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the framework does, with what the loader measured beside the loss."""
        if self._data_scalars is not None and "loss" in logs:
            logs |= self._data_scalars.take()
        super().log(logs, start_time)

    def stand_in(self) -> Any:
        """What the framework's own `__init__` is shown in place of a plan: something with a length."""
        return range(1)

    def _without_plans(self, dataset: Any) -> Any:
        if not _has_plans(dataset):
            return dataset
        if isinstance(dataset, dict):
            return {name: self._without_plans(value) for name, value in dataset.items()}
        return self.stand_in()

    def _as_loader(self, data: Plan | ModelLoader, *, is_training: bool = False) -> ModelLoader:
        plan = data.plan if isinstance(data, ModelLoader) else data
        micro_batch = _micro_batch(plan, self.args) if is_training else None
        if isinstance(data, ModelLoader):
            if micro_batch is not None:
                _check_pieces(data, micro_batch)
            loader = data
        else:
            loader = ModelLoader(
                plan,
                num_workers=self.args.dataloader_num_workers or None,
                prefetch_factor=self.args.dataloader_prefetch_factor,
                pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
                micro_batch=micro_batch,
                steps=plan.num_batches() if is_training else None,
            )
        if not is_training:
            loader.collate_fn = functools.partial(model_arguments, labels=plan.labels, once=True)
        return loader


class Trainer(TakesPlans):
    """The `Trainer` of transformers, whose datasets may be plans."""


def _positional_names(init: Callable[..., None]) -> list[str]:
    """What a trainer calls its positional arguments; those it takes as `*args` are the framework's own."""
    parameters = inspect.signature(init).parameters.values()
    own = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        own += [name for name in inspect.signature(transformers.Trainer).parameters if name not in own]
    return own


def _is_plan(dataset: Any) -> bool:
    return isinstance(dataset, Plan | ModelLoader)


def _has_plans(dataset: Any) -> bool:
    return any(map(_is_plan, dataset.values() if isinstance(dataset, dict) else [dataset]))


def _check_pieces(loader: ModelLoader, micro_batch: int) -> None:
    """Refuse a loader whose batches are not the pieces that the Trainer counts, or whose epochs differ in length."""
    num_steps = loader.plan.num_batches()
    if (loader.micro_batch, loader.steps) != (micro_batch, num_steps):
        raise ValueError(
            f"The loader hands out batches with micro_batch={loader.micro_batch} and steps={loader.steps}, where the "
            f"Trainer counts pieces of {micro_batch} rows and epochs of {num_steps} steps. Use ModelLoader(plan, "
            f"micro_batch={micro_batch}, steps=plan.num_batches(), ...), or give the plan itself."
        )


def _micro_batch(plan: Plan, args: transformers.TrainingArguments) -> int:
    """Rows that a process computes at a time, if these make up the plan's batch."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process: nn.DataParallel would cut packed rows apart. Launch the script with "
            "torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)."
        )
    size, times, processes = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    if plan.global_size != size * times * processes:
        fits, rest = divmod(plan.global_size, times * processes)
        running = "1 process" if processes == 1 else f"{processes} processes"
        advice = f"per_device_train_batch_size={fits} or " if not rest else ""
        # Of batches by tokens, the Trainer counts the least number of rows.
        has, by = (
            ("batch has", "") if plan.token_budget is None else ("batches have a multiple of", "tokens=..., multiple=")
        )
        raise ValueError(
            f"The plan's {has} {plan.global_size} rows, a step of the Trainer {size * times * processes}: "
            f"per_device_train_batch_size={size} x gradient_accumulation_steps={times} x {running}. "
            f"Use {advice}plan.batch({by}{size * times * processes})."
        )
    return int(size)
