"""The C++ of csrc/host against its NumPy references: the same bits, with the GIL released."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maelm_fast import native
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import end_to_end, pack, pack_plain, pack_update
from maelm_fast.data.order import permutation, permutation_numpy
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from tests.batches import assert_same_batch

host = native.host()
pytestmark = pytest.mark.skipif(host is None, reason=native.reasons.get("host", ""))

VOCABULARY = Vocabulary(size=70, mask_id=69, special=(69, 0, 1, 2, 3))
KINDS: list[dict[str, Any]] = [{"shown": shown} for shown in (0.0, 0.25, 0.5, 1 / 3, 1.0)]
KINDS += [{"policy": "bert"}, {"policy": "random"}]
DTYPES = ["uint8", "int16", "uint16", "uint32", "int32", "int64", "uint64"]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40) | st.sampled_from([1, 127, 255, 512, 1001]), max_size=7),
    draw=st.integers(0, 2**32 - 1),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2),
    epochs=st.lists(st.sampled_from([0, 1, 7, 2**32 - 1]), min_size=1, max_size=3),
    first=st.sampled_from([0, 12345, 2**32 - 2000]),
    rate=st.floats(0.001, 0.999) | st.sampled_from([0.15, 0.5, 1 - 2**-53, 2**-60]),
    count=st.sampled_from(["fixed", "stochastic"]),
    special_tokens=st.booleans(),
    kind=st.sampled_from(KINDS) | st.fixed_dictionaries({"shown": st.floats(0, 1)}),
    sees_mask=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    stride=st.sampled_from([1, 2, -1]),
)
def test_packs_the_same_bits(
    lengths: list[int],
    draw: int,
    dtypes: list[str],
    epochs: list[int],
    first: int,
    rate: float,
    count: str,
    special_tokens: bool,
    kind: dict[str, Any],
    sees_mask: bool,
    seed: int,
    stride: int,
) -> None:
    generator = np.random.default_rng(draw)
    rows = [
        generator.integers(0, VOCABULARY.size, n * abs(stride)).astype(dtypes[i % len(dtypes)])[::stride]
        for i, n in enumerate(lengths)
    ]
    samples = (first + generator.integers(0, 2000, len(rows))).astype(np.int64)
    keys = samples, np.array([epochs[i % len(epochs)] for i in range(len(rows))], dtype=np.int64)
    masking = MaskingConfig(rate=rate, count=count, special_tokens=special_tokens, **kind)  # type: ignore[arg-type]
    arguments = rows, *keys, Masker(masking, VOCABULARY, seed, sees_mask)
    assert_same_batch(pack(*arguments), pack_plain(*arguments))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sees_mask", [False, True])
def test_packs_the_same_bits_for_every_option(kind: dict[str, Any], sees_mask: bool) -> None:
    rows = [np.random.default_rng(n).integers(0, VOCABULARY.size, n).astype(np.uint16) for n in (512, 77, 3, 1, 0, 64)]
    for rate, count, special in itertools.product((0.15, 0.4), ("fixed", "stochastic"), (False, True)):
        masking = MaskingConfig(rate=rate, count=count, special_tokens=special, **kind)  # type: ignore[arg-type]
        arguments = rows, np.arange(6), np.full(6, 2), Masker(masking, VOCABULARY, 2**63 + 5, sees_mask)
        assert_same_batch(pack(*arguments), pack_plain(*arguments))


@pytest.mark.parametrize("kind", [{}, {"shown": 0.3}, {"policy": "bert"}, {"policy": "random"}], ids=str)
def test_packs_the_same_bits_at_full_size(kind: dict[str, Any]) -> None:
    """Long enough for ties among the words' top bits and for SIMD loops; a vocabulary that needs uint32."""
    vocabulary = Vocabulary(size=100_000, mask_id=99_999, special=(0, 1, 2, 65_600, 99_999, -7, 100_000))
    rows = [np.random.default_rng(n).integers(0, 100_000, n).astype(np.uint32) for n in (70_001, 8192, 3)]
    masking = MaskingConfig(special_tokens=False, **kind)
    arguments = rows, np.arange(3), np.zeros(3, np.int64), Masker(masking, vocabulary, 3, False)
    assert_same_batch(pack(*arguments), pack_plain(*arguments))


@pytest.mark.parametrize("implementation", [pack, pack_plain])
def test_both_refuse_the_same_input(implementation: Callable[..., PackedBatch]) -> None:
    def call(row: np.ndarray, sample: int = 0, epoch: int = 0, vocabulary: Vocabulary = VOCABULARY) -> PackedBatch:
        keys = np.array([sample]), np.array([epoch])
        return implementation([row], *keys, Masker(MaskingConfig(policy="bert"), vocabulary, 0, False))

    with pytest.raises(UserError, match="token id 70 is outside the vocabulary of 70"):
        call(np.array([0, 70], np.uint16))
    with pytest.raises(UserError, match="token id -1 is outside"):
        call(np.array([0, -1]))
    with pytest.raises(UserError, match="all of the vocabulary are special"):
        call(np.array([0]), vocabulary=Vocabulary(2, 1, (0, 1)))
    with pytest.raises(ValueError, match="samples must lie in"):
        call(np.array([0]), sample=2**32)
    with pytest.raises(ValueError, match="epochs must lie in"):
        call(np.array([0]), epoch=-1)
    with pytest.raises(ValueError, match="integers, not float64"):
        call(np.array([0.5]))
    with pytest.raises(ValueError, match=r"need samples of shape \(1,\)"):
        implementation([np.array([0])], np.arange(2), np.arange(1), Masker(MaskingConfig(), VOCABULARY, 0, False))


@pytest.mark.parametrize("built", [True, False])
def test_an_update_may_have_no_sequences(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all, or micro-batches of none."""
    if not built:
        monkeypatch.setattr(native, "host", lambda: None)
    masker = Masker(MaskingConfig(), VOCABULARY, 0, False)
    nothing = end_to_end([], np.empty(0, int), np.empty(0, int))
    assert pack_update(nothing, [], masker).micro_batches() == []
    one = end_to_end([np.arange(40)], np.zeros(1, int), np.zeros(1, int))
    empty, full = pack_update(one, [0, 1], masker).micro_batches()
    assert_same_batch(empty, pack([], np.empty(0, int), np.empty(0, int), masker))
    assert_same_batch(full, pack([np.arange(40)], np.zeros(1, int), np.zeros(1, int), masker))
    assert (empty.lengths, empty.counts, [len(t) for t in empty.tensors]) == (
        ((), (), ()),
        (0, 0, 0),
        [0] * 4 + [1, 0] * 3,
    )


def test_without_the_extension_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [np.arange(40)], np.arange(1), np.arange(1), Masker(MaskingConfig(), VOCABULARY, 0, False)
    built = pack(*arguments)
    monkeypatch.setattr(native, "host", lambda: None)
    assert_same_batch(pack(*arguments), built)
    assert np.array_equal(permutation(np.arange(50), 50, 1, 2), permutation_numpy(np.arange(50), 50, 1, 2))


def test_the_bindings_check_what_would_be_out_of_bounds() -> None:
    assert host is not None
    good = {
        "ids": np.arange(4),
        "lengths": np.array([1, 3]),
        "samples": np.arange(2),
        "epochs": np.arange(2),
        "counts": [1, 1],
        "alignment": 4,
        "allocate": lambda elements: np.empty(elements, np.int32),
        "rate": 0.5,
        "stochastic": False,
        "special_tokens": True,
        "policy": "mask",
        "shown": 0.0,
        "vocab_size": 4,
        "mask_id": 3,
        "special": (3,),
        "seed": 0,
    }
    assert host.pack(**good) == ([(0,), (1,)], [(1,), (2,)])
    for name, value in (
        ("ids", np.arange(5)),
        ("ids", np.arange(8)[::2]),
        ("ids", np.arange(4.0)),
        ("ids", np.arange(4).reshape(2, 2)),
        ("lengths", np.array([-1, 5])),
        ("lengths", np.array([1, 4])),
        ("samples", np.arange(3)),
        ("epochs", np.arange(1)),
        ("samples", np.array([0, 2**32])),
        ("counts", [1]),
        ("counts", [3, -1]),
        ("counts", [1, 2]),
        ("alignment", 0),
        ("rate", 1.5),
        ("shown", -0.1),
        ("shown", float("nan")),
        ("policy", "none"),
        ("allocate", lambda elements: np.empty(elements - 1, np.int32)),
        ("allocate", lambda elements: np.empty((elements, 2), np.int32)[:, 0]),
    ):
        with pytest.raises(ValueError, match=r"ids|lengths|sample|words|counts|alignment|allocate|shown|policy"):
            host.pack(**{**good, name: value})
    for function in (host.best_fit, host.spread):
        for lengths, budget in (([0], 5), ([6], 5), ([-1], 5), ([1], 2**31)):
            with pytest.raises(ValueError, match=r"lengths|budget"):
                function(np.array(lengths), budget)
    tokens, offsets = np.zeros(4, np.uint16), np.array([0, 4], np.int32)
    for record_batches in (
        [],
        [(tokens[::2], offsets)],
        [(tokens, offsets[:0])],
        [(tokens, offsets), (np.zeros(4), offsets)],
    ):
        with pytest.raises(ValueError, match=r"record batch|contiguous|one type"):
            host.Samples(record_batches)
    for wrong in ([0, 5], [3, 2], [-1, 2]):
        damaged = host.Samples([(tokens, np.array(wrong, np.int32))])
        for function in (damaged.lengths, damaged.read):
            with pytest.raises(ValueError, match="sample 0 has no valid offsets"):
                function(np.array([0]))
    for sample in (-1, 1):
        with pytest.raises(IndexError, match="of 1"):
            host.Samples([(tokens, offsets)]).read(np.array([sample]))
    for half_bits, index, size in ((0, 0, 10), (33, 0, 10), (2, 0, 17), (4, 10, 10), (4, -1, 10)):
        with pytest.raises(ValueError, match=r"half_bits|domain|index"):
            host.permute(np.array([index]), size, half_bits, 8, 0, 0)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 300) | st.integers(1, 2**62),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    draw=st.integers(0, 2**32 - 1),
)
def test_the_order_is_the_same(size: int, seed: int, epoch: int, draw: int) -> None:
    index = np.random.default_rng(draw).integers(0, size, (3, 11))
    ids = permutation(index, size, seed, epoch)
    assert ids.dtype == np.int64
    assert np.array_equal(ids.reshape(-1), permutation_numpy(index.reshape(-1), size, seed, epoch))


def large_calls(scale: int) -> dict[str, Callable[[], object]]:
    """A call of each function that takes `scale` milliseconds or more."""
    assert host is not None
    index = np.arange(1 << 16 << 2 * scale)
    ids, one = np.zeros(1 << 20 << scale, np.uint16), np.zeros(1, np.int64)
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000 << scale)
    row = np.empty(6 * len(ids) + 6, np.int32)
    offsets = np.array([0, len(ids)], np.int32)
    store, whole = host.Samples([(ids, offsets)]), np.zeros(16, np.int64)
    return {
        "permute": lambda: host.permute(index, len(index), 8 + scale, 8, 0, 0),
        "best_fit": lambda: host.best_fit(lengths, 2048),
        "spread": lambda: host.spread(lengths, 2048),
        "read": lambda: store.read(whole),
        "pack": lambda: host.pack(
            ids=ids,
            lengths=np.array([len(ids)]),
            samples=one,
            epochs=one,
            counts=[1],
            alignment=1,
            allocate=lambda elements: row[:elements],
            rate=0.5,
            stochastic=False,
            special_tokens=True,
            policy="mask",
            shown=0.0,
            vocab_size=9,
            mask_id=8,
            special=(),
            seed=0,
        ),
    }


@pytest.mark.parametrize("name", ["pack", "best_fit", "spread", "read", "permute"])
def test_the_gil_is_released(name: str) -> None:
    """With a switch interval of many seconds this thread goes on during the call only if the call lets it. Should the
    system have run the two one after the other all the same, a larger call is tried."""
    for scale in range(5):
        call = large_calls(scale)[name]
        call()  # pybind11 lets go of the GIL once, to find NumPy
        called, returned = threading.Event(), threading.Event()

        def run(
            call: Callable[[], object] = call, called: threading.Event = called, returned: threading.Event = returned
        ) -> None:
            called.set()
            call()
            returned.set()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread = threading.Thread(target=run)
            thread.start()
            called.wait()
            overlapped = not returned.is_set()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        if overlapped:
            return
    pytest.fail("the call held the GIL")


FAULTS = """
import resource, sys
import torch
from maelm_fast import native
if sys.argv[1] == "keep":
    assert native.host().keep_freed_memory()
def step():
    held = [torch.full((n << 20,), 1.0) for n in (9, 14, 10, 12)]  # 36 to 56 MiB each
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):  # the heap finds its shape within about four
    step()
before = faults()
for _ in range(8):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_process_keeps_freed_memory() -> None:
    """The same large blocks step after step: new pages each time, or the same ones.

    Blocks above 32 MiB, because glibc keeps smaller ones by itself once it has seen a few freed.
    """

    def faults(mode: str) -> int:
        run = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        return int(run.stdout)

    leave, keep = faults("leave"), faults("keep")
    assert keep < leave / 20, (leave, keep)


LARGE_PAGES = """
import sys
import torch
from maelm_fast import native
if sys.argv[1] == "keep":
    assert native.host().keep_freed_memory()
held = [torch.full((16 << 20,), 1.0) for _ in range(3)]  # 64 MiB each
fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").readlines()[1:])
print(int(fields["AnonHugePages"].split()[0]) // 1024)
"""


def _large_pages_on_request() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "[madvise]" in file.read()
    except OSError:
        return False


@pytest.mark.skipif(not _large_pages_on_request(), reason="large pages are for all here, or for nobody")
def test_kept_memory_has_large_pages() -> None:
    """MiB in pages of 2 MiB, of 192 MiB that are written. The kernel may lack some."""

    def mebibytes(mode: str) -> int:
        command = [sys.executable, "-c", LARGE_PAGES, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert mebibytes("leave") < 64
    assert mebibytes("keep") > 96
