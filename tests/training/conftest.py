"""The run that others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from maelm_fast.training.job import pretrain
from tests.training.runs import config


@pytest.fixture(scope="session")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain(config(), store, out)
    return out
