"""How rows become samples: text to tokens, chats to tokens and loss masks, images to pixels, columns, functions.

    Transform         settings: frozen, picklable; its identity goes into the manifest
       |  before_run(first rows)    infers column types, chooses the tokenizer's engine
       |  open()                    once per worker: loads the tokenizer, decoder or function
    OpenTransform
       |  (records)                 rows in, columns of samples out
    Output            samples, the row each came from, and the rows that could not become samples

    Tokenize             _tokenize -> _tokenize_rows -> _engine_choice -> _tokenizer_engines -> _tokenizer_source
      conversations                    _tokenize_rows -> _conversations -> _chat_template -> _template_sandbox
        in the layouts of              _chat_formats
      pictures in them                 _conversations -> _pictures -> _processors
      special tokens in texts          _special_tokens
    DecodeImage          _images -> _image_decoder
    IndexVideo, IndexAudio, and the maps DecodeClip and DecodeSound: _media
    FunctionTransform    _functions
    KeepColumns          _keep, which also stores the columns that the others keep
    all of them          _transform: the contract, and columns of text and bytes
    ids back to text     _tokenizer_engines

Knows nothing of tasks, workers or shards.

May import: `errors`, `filesystem`, `identity`, `native`, `schema`, `sources`, `splitmix`. Imported by: `cli`,
`preparation`. Holds no state.
"""

from penstock.transforms._functions import BatchFunction, FunctionTransform
from penstock.transforms._images import DecodeImage
from penstock.transforms._keep import KeepColumns
from penstock.transforms._media import DecodeClip, DecodeSound, IndexAudio, IndexVideo
from penstock.transforms._tokenize import Tokenize
from penstock.transforms._tokenizer_engines import Decoder, find_decoder
from penstock.transforms._transform import OpenTransform, Output, Transform

__all__ = [
    "BatchFunction",
    "DecodeClip",
    "DecodeImage",
    "DecodeSound",
    "Decoder",
    "FunctionTransform",
    "IndexAudio",
    "IndexVideo",
    "KeepColumns",
    "OpenTransform",
    "Output",
    "Tokenize",
    "Transform",
    "find_decoder",
]
