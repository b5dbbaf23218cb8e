"""Masking and packing on the device against the loader's: the same bits, for every option and any lengths."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker, Vocabulary
from maelm_fast.ops.mask_and_pack import mask_and_pack
from tests.batches import assert_same_batch
from tests.ops.checks import DEVICE, opcheck, poisoned_memory

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("maelm_fast.kernels.mask_and_pack")
module = importlib.import_module("maelm_fast.ops.mask_and_pack")

VOCABULARY = Vocabulary(size=60, mask_id=59, special=(0, 59, 2, 1, 3, 3))
ODD = (501, 1, 0)
BACKENDS = ["reference", "triton"]
KINDS: list[dict[str, Any]] = [{"shown": shown} for shown in (0.0, 0.25, 0.5, 1.0)]
KINDS += [{"policy": "bert"}, {"policy": "random"}]
OPTIONS = [
    pytest.param(
        MaskingConfig(rate=rate, count=count, special_tokens=special, **kind),  # type: ignore[arg-type]
        sees_mask,
        id=f"{count}-{'any' if special else 'ordinary'}-{kind}-{'in' if sees_mask else 'out'}",
    )
    for (rate, count, special), kind, sees_mask in itertools.product(
        ((0.15, "fixed", True), (0.4, "stochastic", False)), KINDS, (False, True)
    )
    if not sees_mask or kind.get("shown") in (None, 0.0, 0.5)  # else every share is the same
]


def tokens(lengths: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    """(N,) ids, one in twelve of them special."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY.size, (sum(lengths),), generator=draw).to(dtype)


def by_loader(
    ids: Tensor, lengths: tuple[int, ...], samples: list[int], epochs: list[int], *rest: Any, seed: int, sees_mask: bool
) -> PackedBatch:
    rows = [row.numpy() for row in ids.cpu().split(list(lengths))]
    return pack(rows, np.array(samples), np.array(epochs), Masker(*rest, seed, sees_mask))


def assert_equal(actual: PackedBatch, expected: PackedBatch) -> None:
    assert {tensor.device.type for tensor in actual.tensors} == {DEVICE}
    assert_same_batch(actual, expected)


def check(backend: str, lengths: tuple[int, ...], masking: MaskingConfig, sees_mask: bool, seed: int) -> None:
    ids = tokens(lengths, seed % 1000)
    samples = [(seed + 2_654_435_761 * i) % 2**32 for i in range(len(lengths))]
    epochs = [(0, 7, VALIDATION_EPOCH)[i % 3] for i in range(len(lengths))]
    expected = by_loader(ids, lengths, samples, epochs, masking, VOCABULARY, seed=seed, sees_mask=sees_mask)
    with poisoned_memory():
        actual = mask_and_pack(
            ids.to(DEVICE), lengths, samples, epochs, Masker(masking, VOCABULARY, seed, sees_mask), backend=backend
        )
    assert_equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("masking", "sees_mask"), OPTIONS)
def test_the_bits_are_the_loaders(backend: str, masking: MaskingConfig, sees_mask: bool) -> None:
    check(backend, ODD, masking, sees_mask, seed=2**62 + 12345)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4).map(tuple),
    rate=st.floats(0.001, 0.999),
    count=st.sampled_from(["fixed", "stochastic"]),
    special_tokens=st.booleans(),
    kind=st.sampled_from(KINDS) | st.fixed_dictionaries({"shown": st.floats(0, 1)}),
    sees_mask=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_lengths_and_rates(
    backend: str, lengths: tuple[int, ...], kind: dict[str, Any], sees_mask: bool, seed: int, **masking: Any
) -> None:
    check(backend, lengths, MaskingConfig(**masking, **kind), sees_mask, seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [{"shown": 0.5}, {"policy": "bert"}, {"policy": "random"}], ids=str)
@pytest.mark.parametrize("lengths", [(4096,), (1025, 2), (0,), (1, 0, 1)], ids=str)
def test_long_and_empty_sequences(backend: str, kind: dict[str, Any], lengths: tuple[int, ...]) -> None:
    check(backend, lengths, MaskingConfig(special_tokens=False, **kind), False, seed=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masking", [MaskingConfig(), MaskingConfig(special_tokens=False, policy="bert")])
def test_no_sequence(backend: str, masking: MaskingConfig) -> None:
    ids = torch.empty(0, dtype=torch.int32, device=DEVICE)
    batch = mask_and_pack(ids, (), [], 0, Masker(masking, VOCABULARY, 0, False), backend=backend)
    assert batch.counts == (0, 0, 0)
    assert (
        batch.visible.cu_seqlens.tolist()
        == batch.decoder.cu_seqlens.tolist()
        == batch.masked.cu_seqlens.tolist()
        == [0]
    )
    assert all(t.shape == (0,) for t in (batch.ids, batch.source, batch.masked_index, batch.labels))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "vocabulary", [Vocabulary(60, 59, ()), Vocabulary(60, 59, (59,)), Vocabulary(60, 59, (70, -1))]
)
def test_few_special_tokens(backend: str, vocabulary: Vocabulary) -> None:
    masking, lengths = MaskingConfig(rate=0.5, special_tokens=False, policy="bert"), (90, 33)
    ids = tokens(lengths)
    expected = by_loader(ids, lengths, [4, 5], [1, 1], masking, vocabulary, seed=6, sees_mask=False)
    actual = mask_and_pack(ids.to(DEVICE), lengths, [4, 5], 1, Masker(masking, vocabulary, 6, False), backend=backend)
    assert_equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forms_of_the_arguments(backend: str) -> None:
    """int64 and strided ids, keys as tensors, arrays or one number for all: the same batch."""
    lengths, masking = (40, 7, 21), MaskingConfig(special_tokens=False)
    ids = tokens(lengths)
    expected = by_loader(ids, lengths, [8, 9, 10], [2] * 3, masking, VOCABULARY, seed=1, sees_mask=False)
    columns = torch.full((len(ids), 3), -5, dtype=torch.int64)
    columns[:, 1] = ids
    tensor, array = torch.tensor([8, 9, 10], dtype=torch.int32), np.array([8, 9, 10])
    for given_ids, samples, epochs in (
        (ids.long(), tensor, 2),
        (columns[:, 1], array, torch.tensor(2)),
        (columns.int()[:, 1], range(8, 11), torch.tensor([2, 2, 2])),
    ):
        batch = mask_and_pack(
            given_ids.to(DEVICE), list(lengths), samples, epochs, Masker(masking, VOCABULARY, 1, False), backend=backend
        )
        assert_equal(batch, expected)


@triton.jit
def _smallest_kernel(words, out, length, number, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    drawn = tl.load(words + lane, mask=lane < length, other=0).to(tl.uint32)
    tl.store(out + lane, kernels.smallest(drawn, lane < length, number).to(tl.int32), mask=lane < length)


@pytest.mark.parametrize("words", ["equal", "few", "zeros", "largest"])
@pytest.mark.parametrize("length", [1, 128])
def test_ties_go_to_the_lower_position(words: str, length: int) -> None:
    draw = np.random.default_rng(0)
    values = {
        "equal": np.full(length, 77),
        "few": draw.choice([0, 5, 2**31, 2**32 - 1], length),
        "zeros": np.zeros(length, int),
        "largest": np.full(length, 2**32 - 1),
    }[words]
    order = np.argsort(values, kind="stable")
    given_words = torch.from_numpy(values).to(DEVICE)
    for number in {0, 1, length // 3, length - 1, length}:
        out = torch.empty(length, dtype=torch.int32, device=DEVICE)
        _smallest_kernel[(1,)](given_words, out, length, number, BLOCK=128, num_warps=1)
        assert set(out.cpu().numpy().nonzero()[0]) == set(order[:number])


def test_ties_go_to_the_lower_position_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = lambda length, samples, *_: torch.full((len(samples), length), 77, device=samples.device)  # noqa: E731
    monkeypatch.setattr(module.reference, "position_words", equal)
    masker, lengths = Masker(MaskingConfig(rate=0.5, shown=0.5), VOCABULARY, 0, False), (8, 0, 40)
    batch = mask_and_pack(tokens(lengths).to(DEVICE), lengths, [1, 2, 3], 0, masker, backend="reference")
    assert batch.masked.positions.tolist() == [*range(4), *range(20)]
    assert batch.visible.positions.tolist() == [0, 1, *range(4, 8), *range(10), *range(20, 40)]


def fwd_arguments(masking: MaskingConfig, sees_mask: bool) -> tuple[Any, ...]:
    """Arguments of the registered op, as mask_and_pack() passes them."""
    seen: list[tuple[Any, ...]] = []

    def record(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    original = module.mask_and_pack_triton_fwd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mask_and_pack_triton_fwd", record)
        lengths = (33, 0, 20)
        ids = tokens(lengths).to(DEVICE)
        mask_and_pack(ids, lengths, [1, 2, 3], 0, Masker(masking, VOCABULARY, 4, sees_mask), backend="triton")
    return seen[0]


def test_registration() -> None:
    for masking, sees_mask in ((MaskingConfig(shown=0.5), False), (MaskingConfig(policy="bert"), True)):
        opcheck(torch.ops.maelm_fast.mask_and_pack_triton_fwd.default, *fwd_arguments(masking, sees_mask))
    ids, starts, samples, epochs, special = (
        torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in ([9, 1, 8], [0, 2, 3], [1, 2], [0, 0], [1, 2])
    )
    addends = torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE)
    arguments = (ids, starts, samples, epochs, special, addends, 2, 5, 0.5, False, True)
    opcheck(torch.ops.maelm_fast.mask_and_pack_triton_counts.default, *arguments)


@pytest.mark.parametrize(
    ("backend", "sees_mask", "masking"),
    [
        ("reference", True, MaskingConfig(policy="bert")),
        ("triton", True, MaskingConfig(policy="bert")),
        ("triton", False, MaskingConfig(shown=0.5)),
    ],
)
def test_traces_in_one_graph(backend: str, sees_mask: bool, masking: MaskingConfig) -> None:
    lengths = (40, 7, 21)

    def whole(ids: Tensor, samples: Tensor) -> PackedBatch:
        return mask_and_pack(ids, lengths, samples, 3, Masker(masking, VOCABULARY, 9, sees_mask), backend=backend)

    ids, samples = tokens(lengths).to(DEVICE), torch.tensor([5, 6, 7])
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(ids, samples), whole(ids, samples).to("cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("masking", "sees_mask"), OPTIONS)
def test_the_host_reads_back_at_most_once(
    backend: str, masking: MaskingConfig, sees_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where a tensor turns into Python numbers; samples and epochs, on the host already, are not."""
    original, reads = Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(self.shape) or original(self))
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("item()"))
    monkeypatch.setattr(Tensor, "nonzero", lambda self: pytest.fail("nonzero()"))
    lengths = (40, 7)
    mask_and_pack(
        tokens(lengths).to(DEVICE), lengths, [1, 2], 0, Masker(masking, VOCABULARY, 9, sees_mask), backend=backend
    )
    depends = not masking.special_tokens or (masking.policy == "bert" and not sees_mask)
    assert reads == [(2, 2)] * depends


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [{}, {"shown": 0.5}, {"policy": "random"}], ids=str)
def test_the_host_does_not_wait(backend: str, kind: dict[str, Any]) -> None:
    lengths = (512,) * 8
    ids = tokens(lengths).to(DEVICE)
    for count in ("fixed", "stochastic"):
        masking = MaskingConfig(count=count, **kind)  # type: ignore[arg-type]
        mask_and_pack(ids, lengths, range(8), 0, Masker(masking, VOCABULARY, 9, False), backend=backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mask_and_pack(ids, lengths, range(8), 0, Masker(masking, VOCABULARY, 9, False), backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_is_refused() -> None:
    ids = tokens((5, 6)).to(DEVICE)

    def call(ids: Tensor = ids, lengths: Any = (5, 6), samples: Any = (0, 1), epochs: Any = 0, **rest: Any) -> None:
        mask_and_pack(ids, lengths, samples, epochs, Masker(MaskingConfig(), VOCABULARY, 0, False), **rest)

    call()
    with pytest.raises(UserError, match="int32 or int64, not int16"):
        call(ids.short())
    with pytest.raises(UserError, match=r"ids must be \(N,\)"):
        call(ids[None])
    for lengths in ((5, 5), (12, -1), ()):
        with pytest.raises(UserError, match="the lengths sum to"):
            call(lengths=lengths)
    with pytest.raises(UserError, match=r"samples has shape \(3,\), not \(2,\)"):
        call(samples=(0, 1, 2))
    with pytest.raises(UserError, match="epochs must lie in"):
        call(epochs=-1)
    with pytest.raises(UserError, match="samples must lie in"):
        call(samples=(0, 2**32))
    with pytest.raises(UserError, match="samples must be on the host"):
        call(samples=torch.empty(2, dtype=torch.int64, device="meta"))
    with pytest.raises(UserError, match="no backend 'host'"):
        call(backend="host")
    with pytest.raises(UserError, match="a sequence of 4097 tokens"):
        call(tokens((4097,)).to(DEVICE), (4097,), (0,), backend="triton")


def test_the_kernel_knows_every_kind_of_masking() -> None:
    assert kernels.LONGEST == module._LONGEST
    listed = {(policy, read) for policy, reads in kernels.READ_BY_POLICY.items() for read in reads}
    asked_for = itertools.product([MaskingConfig(**kind) for kind in KINDS], (False, True))
    maskers = [Masker(masking, VOCABULARY, 0, sees_mask) for masking, sees_mask in asked_for]
    assert {(masker.masking.policy, module._read(masker)) for masker in maskers} == listed
