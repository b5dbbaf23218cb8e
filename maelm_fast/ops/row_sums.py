"""The gradient of a bias is the sum of the rows of the gradient behind it. A kernel that writes such a gradient can sum
it on its way; the sums are kept with the tensor, and who needs them asks before it reads the rows again.

autograd hands a gradient that has one reader on as it is. One that was added to another, cast, or changed by a hook is
another tensor, or of another version, and has no sums: then the rows are read. So it is where torch.compile traces.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SUMS = "_maelm_row_sums"


def keep_row_sums(gradient: Tensor, sums: Tensor) -> None:
    """sums: gradient.sum(0) in fp32. gradient: (T, ...)."""
    if not torch.compiler.is_compiling():
        setattr(gradient, _SUMS, (sums, gradient._version))


def row_sums_of(gradient: Tensor) -> Tensor | None:
    sums: Tensor | None
    sums, version = getattr(gradient, _SUMS, (None, 0))
    return sums if sums is not None and gradient._version == version else None
