"""What becomes of a row: text to tokens, chats to tokens and loss masks, images to pixels, columns, functions.

    Transform (settings, picklable) -> open() in a worker -> OpenTransform(records) -> Output (columns of samples)

Knows nothing of tasks, workers or shards.

May import: `compiled`, `errors`, `identity`, `schema`, `sources`. Imported by: `cli`, `preparation`. Holds no state.
"""

from penstock.transforms._columns import KeepColumns
from penstock.transforms._functions import BatchFunction, FunctionTransform
from penstock.transforms._images import DecodeImage
from penstock.transforms._tokenize import Tokenize
from penstock.transforms._transforms import OpenTransform, Output, Transform

__all__ = [
    "BatchFunction",
    "DecodeImage",
    "FunctionTransform",
    "KeepColumns",
    "OpenTransform",
    "Output",
    "Tokenize",
    "Transform",
]
