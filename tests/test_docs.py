"""What the pages say that a program of one's own writes, runs."""

import re
from pathlib import Path

import torch
from torch import nn

from maelm_fast import ops

ROOT = Path(__file__).parent.parent


def test_the_ops_by_hand() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ops.md").read_text(), re.S)
    x, heads = torch.randn(15, 32, requires_grad=True), 2
    table = torch.zeros(heads, 9, requires_grad=True)
    given = {"x": x, "heads": heads, "table": table, "qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)}
    names = {"torch": torch, "ops": ops, **given, "norm": nn.LayerNorm(32)}
    exec(code, names)
    names["x"].square().sum().backward()
    assert x.grad is not None
    assert table.grad is not None
    assert table.grad.abs().sum() > 0
