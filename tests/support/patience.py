"""Sessions of tests wait for partners that a busy machine holds up."""

import gossipgrad as gg
from support.waiting import HANG_SECONDS

__all__ = ["be_patient"]


def be_patient() -> None:
    """Has `gg.Overlap()` of this process wait as long as a test may take."""
    gg.Overlap.__init__.__kwdefaults__["patience_seconds"] = HANG_SECONDS
