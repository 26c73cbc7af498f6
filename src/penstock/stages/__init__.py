"""What the verbs of a plan say: each stage's settings, the order in which stages may come, and how they are written.

    ds.shuffle(seed=7).pack(4096).batch(32)
      -> Shuffle, Pack, Batch     frozen settings, checked when they are made     _stages
      -> may this follow that?    the legal order                                 _rules
      -> text, files, identities  for people, plan files, fingerprints            _rules

Pure data: what rows come of it is for `rows` to say, what batches for `plan`.

May import: `errors`, `identity`, `packing`. Imported by: `plan`, `rows`. Holds no state.
"""

from penstock.stages._rules import (
    LEGAL_ORDER,
    check_next,
    describe_stage,
    order_facts,
    stage_identity,
    stage_json,
    with_groups,
    without_groups,
)
from penstock.stages._stages import (
    IGNORED,
    Balanced,
    Batch,
    Cast,
    Labels,
    Map,
    Mode,
    OnError,
    Pack,
    Pad,
    Positions,
    Repeat,
    SampleWeights,
    Shuffle,
    Side,
    Skip,
    Stage,
    Tail,
    TakeRows,
    Weighted,
    Window,
)

__all__ = [
    "IGNORED",
    "LEGAL_ORDER",
    "Balanced",
    "Batch",
    "Cast",
    "Labels",
    "Map",
    "Mode",
    "OnError",
    "Pack",
    "Pad",
    "Positions",
    "Repeat",
    "SampleWeights",
    "Shuffle",
    "Side",
    "Skip",
    "Stage",
    "Tail",
    "TakeRows",
    "Weighted",
    "Window",
    "check_next",
    "describe_stage",
    "order_facts",
    "stage_identity",
    "stage_json",
    "with_groups",
    "without_groups",
]
