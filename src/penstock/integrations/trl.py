"""The `SFTTrainer` of TRL, with plans for datasets.

    from penstock.integrations.trl import SFTTrainer              # was: from trl import SFTTrainer

The dataset is prepared once, by `penstock prepare` with a chat template, and packed by the plan; TRL's own preparation
and packing are left out. It insists on a `datasets.Dataset` when it is made, so it is shown one of a single row.
"""

from typing import Any

import datasets
import torch
import trl

from penstock.integrations.transformers import ModelLoader, TakesPlans
from penstock.plan import Plan


class SFTTrainer(TakesPlans, trl.SFTTrainer):
    """The `SFTTrainer` of TRL, whose datasets may be plans."""

    def stand_in(self) -> Any:
        """A dataset of one row, as TRL leaves one that it has prepared."""
        return datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            dataset if isinstance(dataset, Plan | ModelLoader) else super()._prepare_dataset(dataset, *args, **kwargs)
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if "input_ids" in inputs and not {"attention_mask", "position_ids"} & inputs.keys():
            # TRL counts tokens by one of the two; token windows are full, and have neither.
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs
