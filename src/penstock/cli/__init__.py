"""The `penstock` command: each verb parses, calls one library function, and renders.

    _main -> the verb's file: add_VERB_arguments declares its flags, run_VERB does its work and returns the exit code

A flag is made of the library's own setting (`_flags`): its type, choices, default and meaning are described there.

May import: `dataset`, `doctor`, `errors`, `filesystem`, `plan`, `preparation`, `remote`, `report`, `schema`, `service`,
`shards`, `sources`, `transforms`, `tuning`. Imported by: nobody. Holds no state.
"""

from penstock.cli._main import main

__all__ = ["main"]
