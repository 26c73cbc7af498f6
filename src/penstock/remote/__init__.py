"""Datasets in object storage: which shards a run needs, and when.

May import: nothing. Imported by: nobody. Holds no state.
"""

from penstock.remote._uses import NEVER, Uses, choose_evictions

__all__ = ["NEVER", "Uses", "choose_evictions"]
