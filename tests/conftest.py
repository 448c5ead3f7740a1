"""Settings for all tests: one thread a rank, real data by environment, no deadlines of chance."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
torch.set_num_threads(1)

os.environ.setdefault("GOSSIPGRAD_DATA", str(Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
