"""The `penstock` command: one thin file per verb, which parses, calls one library function, and renders.

May import: `diagnosis`, `errors`, `filesystem`, `masks`, `placement`, `plan`, `preparation`, `pytorch`, `report`,
`schema`, `service`, `shards`, `sources`, `transforms`, `trials`, `tuning`. Imported by: nobody. Holds no state.
"""

from penstock.cli._main import main

__all__ = ["main"]
