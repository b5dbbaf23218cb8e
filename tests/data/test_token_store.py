import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from maelm_fast import native
from maelm_fast.data import token_store
from maelm_fast.data.token_store import Manifest, Split, SplitWriter, TokenStore
from maelm_fast.data.tokenizer import special_ids, tokenizer_hash, train_tokenizer
from maelm_fast.errors import UserError

LENGTHS = [3, 1, 8, 5, 2, 8, 8, 1, 4, 6]


def write_store(path, vocab_size=300):
    """Ten samples in several shards of several record batches; returns the samples."""
    path.mkdir()
    tokenizer = train_tokenizer(["the fox and the dog and the hen and the cat"] * 9, 300, cased=False)
    tokenizer.save(str(path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, vocab_size, size=n) for n in LENGTHS]
    splits = {}
    for name in ("train", "validation"):
        writer = SplitWriter(path, name, vocab_size)
        for sample in samples:
            writer.add(sample, np.array([len(sample)]))
        writer.close()
        splits[name] = Split(len(LENGTHS), sum(LENGTHS), 1.5, tuple(writer.shards), 1, 2, 3, 0, 0)
    Manifest(1, tokenizer_hash(tokenizer), vocab_size, False, special_ids(tokenizer), 8, "full", splits, {}).write(path)
    return samples


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(token_store, "BATCH_TOKENS", 10)
    monkeypatch.setattr(token_store, "SHARD_TOKENS", 20)


@pytest.fixture
def store(tmp_path, small_pieces):
    return tmp_path / "store", write_store(tmp_path / "store")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, np.uint16), (70_000, np.uint32)])
def test_samples_come_back(tmp_path, small_pieces, vocab_size, dtype):
    samples = write_store(tmp_path / "store", vocab_size)
    store = TokenStore.open(tmp_path / "store")
    assert len(store.manifest.splits["train"].shards) > 1
    assert len(store) == len(samples)
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(store[i], sample)
        np.testing.assert_array_equal(store[i - len(samples)], sample)
        assert store[i].dtype == dtype
    assert store.lengths.dtype == np.int32
    assert store.lengths.tolist() == LENGTHS
    for index in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            store[index]


def test_samples_are_read_only_views_of_the_file(store):
    opened = TokenStore.open(store[0])
    assert np.shares_memory(opened[2], opened[2])
    assert not opened[2].flags.owndata
    assert not opened[2].flags.writeable
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if ".arrow" in line]
    ranges = [[int(end, 16) for end in span.split("-")] for span in maps]
    assert any(low <= opened[2].ctypes.data < high for low, high in ranges)


@pytest.mark.parametrize("compiled", [True, False])
def test_many_samples_at_once(store, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "host", lambda: None)
    elif native.host() is None:
        pytest.skip(native.reasons["host"])
    opened, wanted = TokenStore.open(store[0]), np.array([9, 0, 0, 5, 3])
    assert opened.sample_lengths(wanted).tolist() == [LENGTHS[i] for i in wanted]
    tokens = opened.read(wanted)
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, np.concatenate([store[1][i] for i in wanted]))
    assert opened.sample_lengths(wanted[:0]).shape == opened.read(wanted[:0]).shape == (0,)
    with pytest.raises(IndexError):
        opened.read(np.array([10]))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sample_without_valid_offsets_is_not_cut_short(tmp_path, compiled, monkeypatch):
    """An offset changed in the file, of the right size and with a checksum that nobody has looked at."""
    if not compiled:
        monkeypatch.setattr(native, "host", lambda: None)
    elif native.host() is None:
        pytest.skip(native.reasons["host"])
    write_store(tmp_path / "store")
    (path,) = (tmp_path / "store").glob("train*.arrow")
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int32).tobytes()
    whole = path.read_bytes()
    assert whole.count(offsets) == 1
    damaged = np.cumsum([0, *LENGTHS]).astype(np.int32)
    damaged[-1] += 5
    path.write_bytes(whole.replace(offsets, damaged.tobytes()))
    opened = TokenStore.open(tmp_path / "store")
    assert opened.sample_lengths(np.arange(9)).tolist() == LENGTHS[:9]
    for read in (opened.sample_lengths, opened.read, lambda samples: opened[samples[0]]):
        with pytest.raises(UserError, match=r"damaged \(split train: sample 9 has no valid offsets\): copy"):
            read(np.array([9]))


def test_a_pickled_store_reopens(store):
    opened = TokenStore.open(store[0], "validation")
    copy = pickle.loads(pickle.dumps(opened))
    assert copy.split == "validation"
    np.testing.assert_array_equal(copy[5], store[1][5])
    assert len(pickle.dumps(opened)) < 1000


def test_manifest_round_trip(store):
    manifest = Manifest.read(store[0])
    manifest.write(store[0])
    assert Manifest.read(store[0]) == manifest
    assert manifest.unigram_nats == 1.5
    assert TokenStore.open(store[0]).fingerprint == manifest.fingerprint


def test_stores_of_other_content_have_other_fingerprints(store):
    """The same ids mean another text to another tokenizer. What only says where it came from does not count."""
    manifest = Manifest.read(store[0])
    short = {"train": manifest.splits["train"]}
    changes = ({"tokenizer_sha256": "0" * 64}, {"sample_mode": "document"}, {"seq_len": 9}, {"splits": short})
    others = {dataclasses.replace(manifest, **change).fingerprint for change in changes}
    assert len(others | {manifest.fingerprint}) == 5
    assert dataclasses.replace(manifest, options={"inputs": "elsewhere"}).fingerprint == manifest.fingerprint


def test_tokenizer_must_be_the_stores_own(store):
    assert TokenStore.open(store[0]).tokenizer().get_vocab_size() < 300
    train_tokenizer(["other text, other text"], 300, cased=True).save(str(store[0] / "tokenizer.json"))
    with pytest.raises(UserError, match="is not the tokenizer this store was prepared with"):
        TokenStore.open(store[0]).tokenizer()


def refuses(path, match, split="train"):
    with pytest.raises(UserError, match=match) as caught:
        TokenStore.open(path, split).verify()
    assert "\n" not in str(caught.value)


def test_what_is_no_store(tmp_path, store):
    refuses(tmp_path, "is not a token store")
    refuses(store[0], "has no split 'test': it has train, validation", "test")


def test_manifests_of_other_versions_or_damaged(store):
    path = store[0] / "manifest.json"
    data = json.loads(path.read_text())
    for change, match in [
        ({"version": 99}, "is of version 99"),
        ({"splits": {"train": {}}}, "is damaged"),
        ({"unknown": 1}, "is damaged"),
        ({"splits": []}, "is damaged"),
    ]:
        path.write_text(json.dumps({**data, **change}))
        refuses(store[0], match)
    for text in ("[]", "{}", '{"version"', "7"):
        path.write_text(text)
        refuses(store[0], "is damaged")


def test_shards_missing_truncated_or_changed(store):
    shard = store[0] / "train-00001.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refuses(store[0], "has .* bytes instead of")
    shard.write_bytes(b"\0" * len(content))
    refuses(store[0], "is damaged")
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    refuses(store[0], "checksum|is damaged")
    shard.write_bytes((store[0] / "train-00000.arrow").read_bytes().ljust(len(content), b"\0")[: len(content)])
    refuses(store[0], "damaged|does not hold|bytes instead")
    shard.unlink()
    refuses(store[0], "is missing")
    assert TokenStore.open(store[0], "validation")


def test_writer_counts_tokens(tmp_path):
    writer = SplitWriter(tmp_path, "train", 10)
    writer.add(np.array([0, 5, 5, 0, 9]), np.array([3, 2]))
    writer.close()
    assert writer.token_counts.tolist() == [2, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert (writer.shards[0].samples, writer.shards[0].tokens) == (2, 5)
