"""The tables of README and docs/ that hold what was measured: the one writer of all pages.

A page has them between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.tables

fills every page from `benchmarks/results` and `tests/guarantees.toml`; a test compares them.
"""

from . import _families, _gossip  # they register their tables
from ._guarantees import GUARANTEES
from ._write import PAGES, TABLES, filled, names, table

__all__ = ["GUARANTEES", "PAGES", "TABLES", "_families", "_gossip", "filled", "names", "table"]
