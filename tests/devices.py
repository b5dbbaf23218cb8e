"""Where a test that is for any device runs: on the CPU, and where there is a GPU there too."""

from __future__ import annotations

import pytest
import torch

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
