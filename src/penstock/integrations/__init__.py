"""Plans in the frameworks people train with: one thin module for each that needs one.

    transformers   Trainer: `train_dataset=` and `eval_dataset=` may be plans; ModelLoader: a model's own arguments
    trl            SFTTrainer: the same
    lightning      DataModule: checkpoints in mid-epoch say exactly which batches were trained on
    torchtitan     PlanDataLoader: the loader that its trainer and validator build
    checkpoint     RankState: a loader's state in torch.distributed.checkpoint, where ranks have states of their own
    scalars        LoaderScalars, to_tensorboard: what a loader measures, for any logger

Import the module you need, as in `from penstock.integrations.transformers import Trainer`: each imports its framework,
and nothing imports them. Accelerate, Fabric and loops of your own take a `penstock.DataLoader` as it is, and so needed
no module; examples/ has one script for each.

May import: `loader`, `masks`, `plan`, `pytorch`. Imported by: nobody. Holds no state.
"""
