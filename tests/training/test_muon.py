"""Muon: what an update is, what it leaves alone, which parameters it takes, and the same under FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maelm_fast import presets
from maelm_fast.config import OptimConfig
from maelm_fast.errors import UserError
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.muon import Muon, orthogonal
from maelm_fast.training.optim import build_optimizer, describe
from maelm_fast.training.step import apply_gradients

OPTIM = OptimConfig(
    name="muon", lr=1e-2, muon_lr=3e-2, muon_momentum=0.8, weight_decay=0.1, max_steps=10, warmup_steps=0
)


class Layer(nn.Module):
    """Two matrices of one shape, a wide one, one of three parts, a vector and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 4, bias=False)
        self.qkv = nn.Linear(6, 18, bias=False)
        self.token_table = nn.Parameter(torch.randn(9, 6))


MATRICES = ("first.weight", "second.weight", "wide.weight", "qkv.weight")


def give_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)


def plain_orthogonal(matrix: Tensor) -> Tensor:
    """As published, one matrix, in its own dtype."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_an_update_is_the_published_one() -> None:
    """Against one matrix at a time in float64; all else against AdamW."""
    model = Layer()
    exact = {name: p.detach().double() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OPTIM)
    rest = copy.deepcopy(model)
    others = [p for name, p in rest.named_parameters() if name not in MATRICES]
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.1, fused=True)
    averages = {name: torch.zeros_like(exact[name]) for name in MATRICES}
    for update in range(4):
        give_gradients(model, update)
        give_gradients(rest, update)
        for name in MATRICES:
            gradient, weight = model.get_parameter(name).grad.double(), exact[name]
            averages[name] = 0.8 * averages[name] + 0.2 * gradient
            direction = 0.8 * averages[name] + 0.2 * gradient
            parts = [plain_orthogonal(part) for part in direction.chunk(3 if name == "qkv.weight" else 1)]
            size = 0.2 * max(parts[0].shape) ** 0.5
            exact[name] = weight * (1 - 3e-2 * 0.1) - 3e-2 * size * torch.cat(parts)
        optimizer.step()
        adamw.step()
    for name, parameter in model.named_parameters():
        expected = exact[name] if name in MATRICES else rest.get_parameter(name)
        torch.testing.assert_close(parameter, expected.float(), rtol=0, atol=2e-6 if name in MATRICES else 0, msg=name)


def test_it_is_that_of_pytorch() -> None:
    """But for PyTorch's products, which are bf16."""
    ours, theirs = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
    theirs.load_state_dict(ours.state_dict())
    optimizer = Muon(
        [{"params": [ours.weight], "parts": 1, "lr_ratio": 1.0, "momentum": 0.95}], torch.bfloat16, lr=0.02
    )
    peer = torch.optim.Muon([theirs.weight], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    start = ours.weight.detach().clone()
    for update in range(3):
        give_gradients(ours, update)
        give_gradients(theirs, update)
        optimizer.step()
        peer.step()
    assert (ours.weight - theirs.weight).norm() < 0.02 * (ours.weight - start).norm()


def test_singular_values_become_about_one() -> None:
    for shape in ((5, 16, 16), (2, 12, 40), (2, 40, 12)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, dtype=torch.float64)))
        assert (values < 1.25).all()
        assert ((values > 0.65).float().mean(1) > 0.8).all()
    assert orthogonal(torch.zeros(1, 4, 4)).eq(0).all()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [p.detach().clone() for p in model.parameters()]
    return parameters + [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["qkv.weight", "token_table"])
def test_an_update_without_a_finite_gradient_changes_neither_weights_nor_state(bad: float, where: str) -> None:
    """Of neither kind of group, whichever has it; nor the updates after it."""
    model = Layer()
    twin = copy.deepcopy(model)
    optimizer, other = build_optimizer(model, OPTIM), build_optimizer(twin, OPTIM)
    for update in (0, 1, 2):
        give_gradients(model, update)
        if update == 1:
            model.get_parameter(where).grad[0, 0] = bad
            before = state_of(model, optimizer)
        _, skipped = apply_gradients(optimizer, list(model.parameters()), 1.0)
        assert skipped == (update == 1)
        if update == 1:
            assert all(map(torch.equal, before, state_of(model, optimizer)))
            continue
        give_gradients(twin, update)
        apply_gradients(other, list(twin.parameters()), 1.0)
    assert all(map(torch.equal, state_of(model, optimizer), state_of(twin, other)))


def test_clipping_divides_muons_gradients_too() -> None:
    """Which a first update, orthogonal as it is, does not show, but the next one does."""
    model, twin = Layer(), Layer()
    twin.load_state_dict(model.state_dict())
    for one, clip in ((model, 1.0), (twin, 0.0)):
        optimizer = build_optimizer(one, OPTIM)
        for update, factor in enumerate((1.0, 100.0)):
            give_gradients(one, update, factor)
            if clip == 0.0:
                torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            apply_gradients(optimizer, list(one.parameters()), clip)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_hidden_matrices_are_muons_and_all_else_is_adamws() -> None:
    config = presets.get("table2/self_cross").model
    small = presets.change(presets.get("table2/decoder_512"), model={"vocab_size": 300, "num_layers": 1}).model
    for sizes, count in ((config, 12 * 4 + 4 * 6 + 1), (small, 4 + 4 * 4 + 3)):
        with torch.device("meta"):
            model = MaeLm(sizes)
        optimizer = build_optimizer(model, OptimConfig(name="muon", decay="matrices"))
        names = {p: name for name, p in model.named_parameters()}
        muon = [group for group in optimizer.param_groups if "parts" in group]
        taken = {names[p] for group in muon for p in group["params"]}
        assert len(taken) == count
        assert all(name.endswith(".weight") and "norm" not in name and "bias" not in name for name in taken)
        assert {names[p] for group in muon if group["parts"] == 3 for p in group["params"]} == {
            name for name in taken if name.endswith("qkv.weight")
        }
        assert sorted(names[p] for group in optimizer.param_groups for p in group["params"]) == sorted(names.values())
        assert {group["weight_decay"] for group in muon} == {0.01}
    assert describe(optimizer) == (
        "optimiser: Muon for the blocks' and the head's matrices, 23 tensors of 20,709,376; AdamW for all else, 53 "
        "tensors of 943,040"
    )


def test_a_learning_rate_of_muon_without_muon_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim\.muon_lr is set but optim\.name is adamw: set optim\.name=muon"):
        OptimConfig(muon_lr=1e-3)
    assert build_optimizer(Layer(), OptimConfig(name="muon", lr=1e-3)).param_groups[-1]["lr_ratio"] == 1.0


@pytest.fixture
def sharded() -> Iterator[Any]:
    """What makes FSDP2's parts of a module, over a group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda module: fully_shard(module, mesh=mesh)
    finally:
        dist.destroy_process_group()


def test_it_updates_parameters_in_parts(sharded: Any) -> None:
    model = Layer()
    twin = copy.deepcopy(model)
    sharded(model)
    one, other = build_optimizer(model, OPTIM), build_optimizer(twin, OPTIM)
    for update in range(2):
        give_gradients(twin, update)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            mine.grad = torch.distributed.tensor.distribute_tensor(theirs.grad, mine.device_mesh, mine.placements)
        one.step()
        other.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
    assert one.state[model.qkv.weight]["momentum"].placements == model.qkv.weight.placements
