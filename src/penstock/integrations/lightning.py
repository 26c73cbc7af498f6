"""Lightning, with plans for data: a `DataModule` whose checkpoints say exactly what was trained on.

    trainer.fit(model, DataModule(train=plan, validation=other_plan), ckpt_path="last")

Lightning saves and loads the state of a loader with its checkpoints. What is left to do is here:

- **Length.** It asks a loader for its length once, and epochs of `tail="carry"` differ by a batch: after a resume in a
  short one it would leave out the last batch of the long ones. So its epochs are loops of equally many steps.
- **A batch ahead.** From a loader without a length (a stream) it takes one batch more than it trains on, to know which
  is the last; a checkpoint would leave that batch out. `TrainedState` remembers the state before it.
- **Scalars.** What the loader measured goes to the trainer's loggers, as often as the trainer logs: `LogLoader`.
"""

from collections.abc import Iterator
from typing import Any

import lightning

from penstock.integrations.scalars import LoaderScalars
from penstock.plan import Plan
from penstock.pytorch import DataLoader


class DataModule(lightning.LightningDataModule):
    """Plans, or loaders, to train, validate, test and predict on; `options` are the `DataLoader`'s, for plans."""

    def __init__(
        self,
        train: Plan | DataLoader | None = None,
        validation: Plan | DataLoader | None = None,
        test: Plan | DataLoader | None = None,
        predict: Plan | DataLoader | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._train, self._validation, self._test, self._predict = train, validation, test, predict
        self._options = options
        given = {"train": train, "val": validation, "test": test, "predict": predict}
        for name in (f"{kind}_dataloader" for kind, data in given.items() if data is None):
            # Lightning asks whether the method is its own, and if not, misses a `validation_step`.
            setattr(self, name, getattr(super(), name))

    def train_dataloader(self) -> Any:
        """What is trained on, in loops of equally many steps."""
        data = self._train
        if isinstance(data, Plan):
            data = DataLoader(data, steps=data.num_batches(), **self._options)
        return data if data is None or _has_length(data) else TrainedState(data)

    def val_dataloader(self) -> Any:
        """What is validated on."""
        return self._loader(self._validation)

    def test_dataloader(self) -> Any:
        """What is tested on."""
        return self._loader(self._test)

    def predict_dataloader(self) -> Any:
        """What is predicted."""
        return self._loader(self._predict)

    def _loader(self, data: Plan | DataLoader | None) -> Any:
        return DataLoader(data, **self._options) if isinstance(data, Plan) else data


class TrainedState:
    """A loader without a length, whose state is that of the batch before the last one taken: of the one trained on."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self._trained = loader.state_dict()

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches."""
        taken = self.loader.state_dict()
        for batch in self.loader:
            self._trained, taken = taken, self.loader.state_dict()
            yield batch
        self._trained = self.loader.state_dict()  # nothing is ahead of the last one

    def state_dict(self) -> dict[str, Any]:
        """The state after the batch that is trained on."""
        return self._trained

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state stands."""
        self.loader.load_state_dict(state)
        self._trained = self.loader.state_dict()


class LogLoader(lightning.Callback):
    """Sends what the training loader measured to the trainer's loggers, every `log_every_n_steps`."""

    def __init__(self) -> None:
        self._scalars: LoaderScalars | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin to count."""
        loader = trainer.train_dataloader
        loader = loader.loader if isinstance(loader, TrainedState) else loader
        self._scalars = LoaderScalars(loader) if isinstance(loader, DataLoader) else None

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any, **__: Any) -> None:
        """Log, when it is time to."""
        if self._scalars is None or not trainer.log_every_n_steps or trainer.global_step % trainer.log_every_n_steps:
            return
        scalars = self._scalars.take()
        for logger in trainer.loggers if scalars else []:
            logger.log_metrics(scalars, step=trainer.global_step)


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):  # how loaders without a length refuse to tell it
        return False
    return True
