"""The `penstock` command: one thin file per verb, which parses, calls one library function, and renders.

May import: `dataset`, `doctor`, `errors`, `filesystem`, `plan`, `preparation`, `report`, `schema`, `service`,
`shards`, `sources`, `transforms`, `tuning`. Imported by: nobody. Holds no state.
"""

from penstock.cli._main import main

__all__ = ["main"]
