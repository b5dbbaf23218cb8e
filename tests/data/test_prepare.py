import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from maelm_fast.cli import data as cli
from maelm_fast.data import prepare as module
from maelm_fast.data.prepare import Chunk, PrepareConfig, cut_blocks, cut_documents, prepare, training_sample
from maelm_fast.data.token_store import Manifest, TokenStore
from maelm_fast.errors import UserError
from maelm_fast.work import lock
from tests.waiting import HANG

WORDS = ["Apple", "bear", "cloud", "Door", "earth", "fire", "grass", "house", "ink", "jar"]


def write_text(path, documents=60, seed=0):
    rng = np.random.default_rng(seed)
    lines = [
        [" ".join(rng.choice(WORDS, size=rng.integers(2, 30))) for _ in range(rng.integers(1, 6))]
        for _ in range(documents)
    ]
    path.write_text("\n\n".join("\n".join(document) for document in lines))
    return path


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_CHARS", 3000)
    return write_text(tmp_path / "text.txt")


def configure(text, out="store", **options):
    defaults = {"vocab_size": 300, "seq_len": 32, "validation": 0.2, "workers": 1}
    return PrepareConfig(inputs=(str(text),), out=text.parent / out, **{**defaults, **options})


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def fails(match, config):
    with pytest.raises(UserError, match=match) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)


def decoded(store):
    tokenizer = store.tokenizer()
    return [tokenizer.decode(sample.tolist()) for sample in store]


# The whole job


def test_full_samples_hold_the_text_in_order(text):
    manifest = prepare(configure(text))
    texts = {}
    for name, split in manifest.splits.items():
        store = TokenStore.open(text.parent / "store", name)
        store.verify()
        assert set(store.lengths.tolist()) == {32}
        assert {int(sample[0]) for sample in store} == {0}
        assert split.tokens == 32 * len(store)
        stream = np.concatenate([sample[1:] for sample in store])
        lines = np.split(stream, np.flatnonzero(stream == 2) + 1)[:-1]
        tokenizer = store.tokenizer()
        texts[name] = [tokenizer.decode(line[:-1].tolist()) for line in lines]
        assert split.dropped_tokens < 31
    documents = text.read_text().lower().split("\n\n")
    assert sum(split.documents for split in manifest.splits.values()) == len(documents)
    assert sum(split.text_bytes for split in manifest.splits.values()) == sum(
        len(d.replace("\n", "")) for d in documents
    )
    everything = [line for document in documents for line in document.split("\n")]
    for lines in texts.values():
        remaining = iter(everything)
        assert all(line in remaining for line in lines)  # a subsequence
    assert sum(map(len, texts.values())) >= len(everything) - 20


def test_document_samples_are_whole_lines_of_one_document(text):
    manifest = prepare(configure(text, sample_mode="document", seq_len=64))
    lines_of = [document.split("\n") for document in text.read_text().lower().split("\n\n")]
    lines_found = []
    for name in manifest.splits:
        store = TokenStore.open(text.parent / "store", name)
        tokenizer = store.tokenizer()
        for sample in store:
            assert sample[0] == 0
            assert len(sample) <= 64
            assert sample[-1] == 2
            ends = np.flatnonzero(sample == 2)
            found = [tokenizer.decode(line[:-1].tolist()) for line in np.split(sample[1:], ends)[:-1]]
            assert any(found == lines[i : i + len(found)] for lines in lines_of for i in range(len(lines)))
            lines_found += found
        assert (manifest.splits[name].split_lines, manifest.splits[name].dropped_tokens) == (0, 0)
    assert sorted(lines_found) == sorted(line for lines in lines_of for line in lines)  # nothing is left out


@pytest.mark.parametrize("mode", ["full", "document"])
def test_bytes_do_not_depend_on_the_number_of_processes(text, mode):
    one = prepare(configure(text, "one", sample_mode=mode))
    two = prepare(configure(text, "two", sample_mode=mode, workers=2))
    assert content(text.parent / "one") == content(text.parent / "two")
    assert one.fingerprint == two.fingerprint


DYING = """
import os, pathlib, signal, sys
from maelm_fast.data import prepare as module
from maelm_fast.data.prepare import PrepareConfig
if __name__ == "__main__":
    text, workers, files = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    module.CHUNK_CHARS = 3000
    replace, done = os.replace, []
    def replace_and_die(*names):
        if len(done) == files:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(replace(*names))
    os.replace = replace_and_die
    module.prepare(PrepareConfig(inputs=(str(text),), out=text.parent / "killed", vocab_size=300, seq_len=32,
                                 validation=0.2, workers=workers))
"""


def run_and_kill(text, workers, files):
    """`prepare` in a process that finishes `files` files and is killed while it writes the next. Returns its exit code.

    Waits until the output is closed, so until the last worker is gone."""
    script = text.parent / "dying.py"
    script.write_text(DYING)
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    command = [sys.executable, str(script), str(text), str(workers), str(files)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=HANG).returncode


def test_killed_at_every_step_and_gone_on_with(text):
    prepare(configure(text))
    codes = [run_and_kill(text, workers=1, files=1)]
    while codes[-1] == -signal.SIGKILL:
        assert not (text.parent / "killed").exists()
        codes.append(run_and_kill(text, workers=1, files=1))
    assert codes[-1] == 0
    assert len(codes) > 4
    assert content(text.parent / "killed") == content(text.parent / "store")
    assert not (text.parent / "killed.partial").exists()


def test_workers_of_a_killed_run_end_too(text):
    prepare(configure(text))
    assert run_and_kill(text, workers=2, files=3) == -signal.SIGKILL
    assert len(list((text.parent / "killed.partial").rglob("*.npz"))) == 1
    prepare(configure(text, "killed"))
    assert content(text.parent / "killed") == content(text.parent / "store")


def test_done_already_and_done_differently(text):
    manifest = prepare(configure(text))
    lines = []
    assert prepare(configure(text), lines.append) == manifest
    assert lines == [f"{text.parent / 'store'} is already prepared"]
    fails(r"was prepared differently \(seq_len\)", configure(text, seq_len=16))
    write_text(text, seed=1)
    fails(r"was prepared differently \(inputs\)", configure(text))


def test_inputs_are_known_by_what_they_hold(text):
    manifest = prepare(configure(text))
    os.utime(text, ns=(0, 0))
    assert prepare(configure(text)) == manifest
    elsewhere = text.parent / "elsewhere" / text.name
    elsewhere.parent.mkdir()
    text.rename(elsewhere)
    lines = []
    moved = dataclasses.replace(configure(text), inputs=(str(elsewhere),))
    assert prepare(moved, lines.append) == manifest
    assert lines[0].startswith(f"{elsewhere} is not where or not from when it was")
    content = elsewhere.read_bytes()
    elsewhere.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    fails(r"was prepared differently \(inputs\)", moved)
    elsewhere.write_bytes(content)
    other_name = elsewhere.rename(elsewhere.with_suffix(".jsonl"))
    fails(r"was prepared differently \(inputs\)", dataclasses.replace(moved, inputs=(str(other_name),)))


def test_a_store_without_checksums_of_its_inputs(text):
    prepare(configure(text))
    path = text.parent / "store" / "manifest.json"
    data = json.loads(path.read_text())
    for entry in data["options"]["inputs"]:
        del entry["sha256"]
    del data["sha256"]  # of a time when a manifest had no checksum of its own either
    path.write_text(json.dumps(data))
    assert len(TokenStore.open(path.parent)) > 0
    assert prepare(configure(text)).options == data["options"]
    os.utime(text, ns=(0, 0))
    fails(r"was prepared differently \(inputs\)", configure(text))


def test_inputs_that_change_while_they_are_read(text, monkeypatch):
    assemble = module._assemble

    def slow_assemble(*arguments):
        text.write_text(text.read_text() + " more")
        return assemble(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_assemble", slow_assemble)
        fails(r"text.txt changed while it was read: remove .*store.partial and run", configure(text))
    fails(r"was begun differently \(inputs\)", configure(text))
    assert not (text.parent / "store").exists()


def test_a_whole_store_that_is_only_not_renamed_yet(text, monkeypatch):
    def interrupted(*_):  # as by SIGINT, which a shell's background jobs ignore
        raise KeyboardInterrupt

    prepare(configure(text, "other"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(configure(text))
    fails(r"was begun differently \(seed\)", configure(text, seed=1))
    prepare(configure(text))
    assert content(text.parent / "store") == content(text.parent / "other")


def interrupt(config, monkeypatch, at):
    """Lets `prepare` write `at` files, then fails as a full disk does."""
    replace, calls = os.replace, []

    def full(*names):
        calls.append(names)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(names[1]))
        replace(*names)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        fails("No space left on device: free some space", config)


def test_a_full_disk_leaves_whole_files_and_is_gone_on_from(text, monkeypatch):
    prepare(configure(text))
    interrupt(configure(text, "other"), monkeypatch, at=4)
    partial = text.parent / "other.partial"
    assert not list(partial.rglob("*.tmp"))
    assert len(list(partial.rglob("*.npz"))) == 2
    fails(r"was begun differently \(seed\)", configure(text, "other", seed=1))
    os.utime(text, ns=(0, 0))  # as after a new mount
    lines = []
    prepare(configure(text, "other"), lines.append)
    assert any("2 chunks are done" in line for line in lines)
    assert content(text.parent / "other") == content(text.parent / "store")


def test_beginning_anew_when_nothing_is_lost(text, monkeypatch):
    interrupt(configure(text), monkeypatch, at=2)  # plan and tokenizer
    prepare(configure(text, "other", seed=1, vocab_size=280))
    prepare(configure(text, seed=1, vocab_size=280))
    assert content(text.parent / "other") == content(text.parent / "store")


def test_two_runs_at_once(text):
    with lock(text.parent / "store.lock"):
        fails("is being written by another run", configure(text))


def test_a_run_that_ended_meanwhile(text, monkeypatch):
    lines = []

    def late(path, **options):
        monkeypatch.setattr(module, "lock", lock)
        prepare(configure(text))
        return lock(path, **options)

    monkeypatch.setattr(module, "lock", late)
    prepare(configure(text), lines.append)
    assert lines == [f"{text.parent / 'store'} is already prepared"]
    assert sorted(path.name for path in text.parent.iterdir()) == ["store", "text.txt"]


def test_other_things_in_the_way(text):
    (text.parent / "store").mkdir()
    fails("exists and is not a token store", configure(text))
    (text.parent / "other.partial").mkdir()
    (text.parent / "other.partial" / "precious").touch()
    fails("holds precious", configure(text, "other"))
    assert [path.name for path in (text.parent / "other.partial").iterdir()] == ["precious"]
    fails("cannot write .*Not a directory", dataclasses.replace(configure(text), out=text / "x"))


def test_damaged_chunk(text, monkeypatch):
    interrupt(configure(text), monkeypatch, at=4)
    chunk = min((text.parent / "store.partial").rglob("*.npz"))
    chunk.write_bytes(chunk.read_bytes()[:-100])
    fails("is damaged: remove it and all later ones", configure(text))


# Splits


def test_validation_is_chosen_by_text_alone(text):
    prepare(configure(text, "one", sample_mode="document"))
    documents = text.read_text().split("\n\n")
    text.write_text("\n\n".join(reversed(documents + documents[:20])))
    prepare(configure(text, "two", sample_mode="document"))
    one, two = (set(decoded(TokenStore.open(text.parent / name, "validation"))) for name in ("one", "two"))
    assert one == two
    prepare(configure(text, "three", sample_mode="document", seed=1))
    assert set(decoded(TokenStore.open(text.parent / "three", "validation"))) != one


def test_validation_inputs(text):
    other = write_text(text.parent / "other.txt", documents=10, seed=5)
    manifest = prepare(configure(text, validation_inputs=(str(other),)))
    assert (manifest.splits["train"].documents, manifest.splits["validation"].documents) == (60, 10)
    reversed_roles = prepare(configure(other, "reversed", validation_inputs=(str(text),)))
    assert reversed_roles.splits["validation"].documents == 60
    fails("is an input and a validation input", configure(text, "both", validation_inputs=(str(other), str(text))))


@pytest.mark.parametrize(("share", "name"), [(1e-9, "validation"), (1 - 1e-9, "train")])
def test_a_split_without_samples(text, share, name):
    fails(f"the {name} split has 0 documents and 0 tokens, too few", configure(text, validation=share))
    assert sorted(path.name for path in text.parent.iterdir()) == ["text.txt"]


def test_bad_text_leaves_nothing(text):
    text.write_bytes(text.read_bytes() + b"\xff")
    fails("not UTF-8", configure(text))
    assert sorted(path.name for path in text.parent.iterdir()) == ["text.txt"]


# Tokenizer


@pytest.mark.parametrize("inputs", [False, True])
def test_the_tokenizer_sees_nothing_of_the_validation_split(text, inputs):
    """A word of those documents alone is no token; had they been among the inputs of training, it would be."""
    foreign = text.parent / "foreign.txt"
    foreign.write_text("\n\n".join(" ".join(["zyzzyva"] * 50 + [str(i)]) for i in range(20)))
    if inputs:
        config = configure(text, validation_inputs=(str(foreign),), validation=PrepareConfig.validation)
    else:
        config = dataclasses.replace(configure(text), inputs=(str(text), str(foreign)))
    with pytest.MonkeyPatch.context() as patch:
        if not inputs:
            patch.setattr(module._Job, "in_validation", lambda _, document: "zyzzyva" in document[0])
        prepare(config)
    store = TokenStore.open(config.out, "validation")
    assert all("zyzzyva" in sample for sample in decoded(store))
    assert len(store.tokenizer().encode("zyzzyva", add_special_tokens=False).ids) > 3
    config = dataclasses.replace(config, inputs=(str(text), str(foreign)), validation_inputs=())
    prepare(dataclasses.replace(config, out=text.parent / "both"))
    store = TokenStore.open(text.parent / "both")
    assert len(store.tokenizer().encode("zyzzyva", add_special_tokens=False).ids) == 1


def test_given_tokenizer(text):
    first = prepare(configure(text))
    given = text.parent / "store" / "tokenizer.json"
    again = prepare(configure(text, "again", tokenizer=given, vocab_size=None))
    assert again.fingerprint == first.fingerprint
    with pytest.raises(UserError, match="remove vocab_size and cased"):
        configure(text, tokenizer=given)


@pytest.mark.parametrize("mode", ["full", "document"])
def test_a_given_tokenizer_s_own_special_tokens_begin_samples_and_end_lines(text, mode):
    names = ["[PAD]", "[UNK]", "[SEP]", "[CLS]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(text.parent / "words.json"))
    given = text.parent / "words.json"
    manifest = prepare(configure(text, tokenizer=given, vocab_size=None, sample_mode=mode))
    assert (manifest.special_tokens["[CLS]"], manifest.special_tokens["[SEP]"]) == (3, 2)
    lines = 0
    for name in manifest.splits:
        for sample in TokenStore.open(text.parent / "store", name):
            assert sample[0] == 3
            assert set(sample[1:].tolist()) <= {2, *range(5, 15)}
            lines += (sample == 2).sum()
    assert lines >= len(text.read_text().split()) / 30


def test_a_tokenizer_with_gaps_in_its_ids(text):
    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: 2 * i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.save(str(text.parent / "gaps.json"))
    fails(
        "gaps.json has 15 tokens and an id 28: ids must leave no gaps",
        configure(text, tokenizer=text.parent / "gaps.json", vocab_size=None),
    )


def test_small_tokenizer_is_reported(text):
    lines = []
    manifest = prepare(configure(text, vocab_size=5000, cased=True), lines.append)
    assert manifest.cased
    assert f"the text gives a tokenizer of only {manifest.vocab_size:,} tokens" in lines


def test_training_sample():
    documents = [(f"document {i}",) for i in range(1000)]
    assert training_sample(documents, 1 << 20) == documents
    some = training_sample(documents, 5000)
    assert 1500 < sum(len(line) for document in some for line in document) <= 5000
    assert set(training_sample(reversed(documents), 5000)) == set(some)


# Samples


def chunk_of(documents):
    """Documents as lists of line lengths; tokens count up from 10."""
    lines = [length for document in documents for length in document]
    tokens = np.arange(10, 10 + sum(lines)).astype(np.uint16)
    tokens[np.cumsum(lines) - 1] = 2
    sums = np.array([sum(document) for document in documents])
    zeros = np.zeros(len(documents), dtype=np.int64)
    return Chunk(tokens, sums, zeros, zeros, zeros.astype(bool))


def lengths_of(cuts):
    return np.concatenate([cut.lengths for cut in cuts]).tolist()


def slow_pack(documents, size):
    """`cut_documents` for one document after another, line after line."""
    samples = []
    for document in documents:
        current = 0
        for line in document:
            for start in range(0, line, size):
                piece = min(size, line - start)
                if current + piece > size:
                    samples.append(current)
                    current = 0
                current += piece
        samples.append(current)
    return samples


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=8), st.integers(7, 20))
def test_packing_lines_like_a_plain_loop(documents, size):
    chunk = chunk_of(documents)
    (cut,) = cut_documents([chunk], size + 1)
    expected = slow_pack(documents, size)
    assert cut.lengths.tolist() == [length + 1 for length in expected if length > 1]
    assert cut.dropped_tokens == sum(length == 1 for length in expected)
    assert cut.split_lines == sum(line > size for document in documents for line in document)
    kept = cut.tokens[cut.tokens != 0]
    assert len(kept) + cut.dropped_tokens == len(chunk.tokens)
    assert np.isin(kept, chunk.tokens).all()
    assert (np.diff(kept[kept != 2].astype(int)) > 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(7, 20))
def test_blocks_are_the_stream(chunk_sizes, size):
    chunks = [chunk_of([[length]]) for length in chunk_sizes]
    cuts = list(cut_blocks(chunks, size + 1))
    stream = np.concatenate([chunk.tokens for chunk in chunks])
    samples = np.concatenate([cut.tokens for cut in cuts]).reshape(-1, size + 1)
    assert (samples[:, 0] == 0).all()
    used = samples[:, 1:].ravel()
    np.testing.assert_array_equal(used, stream[: len(used)])
    assert sum(cut.dropped_tokens for cut in cuts) == len(stream) - len(used) < size
    assert set(lengths_of(cuts)) <= {size + 1}


def test_unigram_entropy_is_that_of_the_samples(text):
    manifest = prepare(configure(text))
    tokens = np.concatenate(list(TokenStore.open(text.parent / "store", "validation")))
    shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert manifest.unigram_nats == pytest.approx(-(shares * np.log(shares)).sum())
    assert manifest.splits["train"].unigram_nats > 0


# Configuration and command line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seq_len", 7),
        ("seq_len", 65_537),
        ("vocab_size", 260),
        ("validation", 0.0),
        ("validation", 1.0),
        ("workers", 0),
        ("seed", -1),
        ("sample_mode", "half"),
    ],
)
def test_values_out_of_range(text, option, value):
    with pytest.raises(UserError, match=f"{option} .*not {value}"):
        configure(text, **{option: value})
    assert sorted(path.name for path in text.parent.iterdir()) == ["text.txt"]


def test_command_line(text, capsys):
    out = text.parent / "store"
    arguments = [
        "--out",
        str(out),
        "--vocab-size",
        "300",
        "--mode",
        "document",
        "--seq-len",
        "32",
        "--validation",
        "0.2",
    ]
    assert cli.main(["prepare", str(text), *arguments, "--workers", "1"]) == 0
    assert Manifest.read(out).options["vocab_size"] == 300
    prepared = capsys.readouterr()
    assert "training a tokenizer" in prepared.err
    assert cli.main(["show", str(out), "--samples", "2", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(prepared.out.partition("store:")[0])
    assert "checksums: right" in shown
    assert shown.count("<s>") == 4
    tokenizer = out / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"trim_offsets": true', '"trim_offsets": false'))
    with pytest.raises(UserError, match="is not the tokenizer this store was prepared with"):
        cli.main(["show", str(out), "--verify"])
    with pytest.raises(UserError, match="remove one of the two"):
        cli.main(["prepare", str(text), *arguments, "--validation-input", "x"])
