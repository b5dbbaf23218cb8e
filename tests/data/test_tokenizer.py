import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from maelm_fast.data.tokenizer import (
    BOS,
    EOS,
    encode_documents,
    encode_in_parallel,
    is_cased,
    load_tokenizer,
    special_ids,
    special_names,
    token_dtype,
    tokenizer_hash,
    train_tokenizer,
    with_mask_in_text,
)
from maelm_fast.errors import UserError

TEXTS = ["The quick brown fox jumps over the lazy dog.", "The Dog sleeps; the fox doesn't."] * 5


@pytest.fixture(scope="module")
def uncased():
    return train_tokenizer(TEXTS, 300, cased=False)


@pytest.fixture(scope="module")
def cased():
    return train_tokenizer(TEXTS, 300, cased=True)


def test_what_stands_once_is_no_token():
    assert train_tokenizer(["qzwx"], 300, cased=False).get_vocab_size() == 261
    assert train_tokenizer(["qzwx"] * 2, 300, cased=False).get_vocab_size() > 261


def test_special_ids(uncased):
    size = uncased.get_vocab_size()
    assert size == 300
    assert special_names(uncased) == {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    assert special_ids(uncased) == {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 299}
    assert sorted(uncased.get_vocab().values()) == list(range(size))


def test_small_texts_give_a_small_tokenizer():
    tokenizer = train_tokenizer(["ab ab"], 5000, cased=True)
    assert 261 < tokenizer.get_vocab_size() < 270
    assert tokenizer.token_to_id("<mask>") == tokenizer.get_vocab_size() - 1
    with pytest.raises(UserError, match="at least 261, not 260"):
        train_tokenizer(TEXTS, 260, cased=True)


def test_templates(uncased):
    assert uncased.encode("The fox").tokens[0] == "<s>"
    pair = uncased.encode("fox", "dog")
    fox, dog = (uncased.encode(word, add_special_tokens=False).ids for word in ("fox", "dog"))
    assert pair.ids == [BOS, *fox, EOS, EOS, *dog, EOS]


def test_a_word_is_the_same_at_the_start_and_after_a_mask(uncased):
    def plain(text):
        return uncased.encode(text, add_special_tokens=False).ids

    assert plain("fox fox") == plain("fox") * 2
    assert plain("fox <mask> fox") == [*plain("fox"), 299, *plain("fox")]


def test_offsets_leave_the_space_out(cased):
    text = "The fox"
    spans = [text[a:b] for a, b in cased.encode(text, add_special_tokens=False).offsets]
    assert "".join(spans) == "Thefox"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_decoding_gives_the_text_back(cased, text):
    import unicodedata

    cased.encode_special_tokens = True
    ids = cased.encode(text, add_special_tokens=False).ids
    cased.encode_special_tokens = False  # the other tests' tokenizer
    normal = unicodedata.normalize("NFC", text)
    assert cased.decode(ids) == normal.removeprefix(" ")
    assert 3 not in ids


def test_case(cased, uncased):
    assert is_cased(cased)
    assert not is_cased(uncased)
    assert uncased.encode("THE Fox").ids == uncased.encode("the fox").ids


def test_saved_and_loaded(tmp_path, uncased):
    path = tmp_path / "tokenizer.json"
    uncased.save(str(path))
    assert tokenizer_hash(load_tokenizer(path)) == tokenizer_hash(uncased)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(data.items())), indent=7))
    assert tokenizer_hash(load_tokenizer(path)) == tokenizer_hash(uncased)


def test_loading_switches_truncation_off(tmp_path, uncased):
    path = tmp_path / "tokenizer.json"
    copy = type(uncased).from_str(uncased.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=9)
    copy.save(str(path))
    assert tokenizer_hash(load_tokenizer(path)) == tokenizer_hash(uncased)


def test_training_is_repeatable(uncased):
    assert tokenizer_hash(train_tokenizer(TEXTS, 300, cased=False)) == tokenizer_hash(uncased)


def test_loading_refuses(tmp_path, uncased):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_tokenizer(path)
    type(uncased)(models.BPE()).save(str(path))
    with pytest.raises(UserError, match="lacks special tokens: <s>, <pad>, </s>, <unk>, <mask>"):
        load_tokenizer(path)


def test_a_bert_tokenizer_is_usable(tmp_path):
    """WordPiece with BERT's special tokens, for going on from a BERT checkpoint: lines end in [SEP]."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "dog", "##s"]
    bert = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.add_special_tokens(words[:5])
    bert.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert special_ids(loaded) == {"bos": 2, "pad": 0, "eos": 3, "unk": 1, "mask": 4}
    tokens, lengths = encode_documents(loaded, [("the foxs", "dog"), ("the",)])
    assert tokens.tolist() == [5, 6, 8, 3, 7, 3, 5, 3]
    assert lengths.tolist() == [6, 2]


def test_dtype():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_documents_to_tokens(uncased):
    documents = [("The fox.", "A dog."), ("Special </s> and <mask>!",)]
    tokens, lengths = encode_documents(uncased, documents)
    assert tokens.dtype == np.uint16
    assert lengths.tolist() == [len(part) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    assert np.flatnonzero(tokens == EOS)[-1] == len(tokens) - 1
    assert (tokens == EOS).sum() == 3  # the one in the text is characters
    assert uncased.decode(tokens[lengths[0] : -1].tolist()) == "special </s> and <mask>!"
    line = uncased.encode("The fox.", add_special_tokens=False).ids
    assert tokens[: len(line) + 1].tolist() == [*line, EOS]
    assert uncased.encode_special_tokens is False


def test_processes_give_the_same_in_order(tmp_path, uncased):
    uncased.save(str(tmp_path / "tokenizer.json"))
    chunks = [[(f"The fox number {i}.",) * (i + 1)] for i in range(9)]
    alone, together = (list(encode_in_parallel(iter(chunks), tmp_path / "tokenizer.json", n)) for n in (1, 2))
    assert [item[0] for item in together] == chunks
    for mine, theirs in zip(alone, together, strict=True):
        np.testing.assert_array_equal(mine[1], theirs[1])
        np.testing.assert_array_equal(mine[2], theirs[2])


def test_with_mask_in_text_changes_nothing_without_a_mask(uncased):
    """This project's own lines, thousands of them, whole and word by word, and where each token stands."""
    root = Path(__file__).parents[2]
    files = [*root.glob("maelm_fast/**/*.py"), *root.glob("docs/*.md"), *root.glob("*.md")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "<" not in line]
    lines = [*lines[::5], "", " ", "  two  spaces\tand", "\ttab", "\u00a0nbsp", "\u2581 \u2581x", "🙂 中文"]
    assert len(lines) > 3000
    changed = with_mask_in_text(uncased)
    for before, after in zip(uncased.encode_batch(lines), changed.encode_batch(lines), strict=True):
        assert before.ids == after.ids
        assert before.offsets == after.offsets
    words = [line.split() for line in lines[:300]]
    assert [e.ids for e in uncased.encode_batch(words, is_pretokenized=True)] == [
        e.ids for e in changed.encode_batch(words, is_pretokenized=True)
    ]
    assert uncased.encode("the dog", "sleeps").ids == changed.encode("the dog", "sleeps").ids


def test_with_mask_in_text_puts_no_space_behind_a_mask(uncased):
    mask, dog = uncased.token_to_id("<mask>"), uncased.encode("dog", add_special_tokens=False).ids
    assert len(dog) == 1
    for text in ("the dog.", "dog, the fox", "dog", "the dogs", "dog; dog the dog"):
        ids = [mask if token == dog[0] else token for token in uncased.encode(text).ids]
        assert with_mask_in_text(uncased).encode(text.replace("dog", "<mask>")).ids == ids
        assert mask in ids


def test_with_mask_in_text_leaves_other_tokenizers_alone():
    tokenizer = Tokenizer(models.BPE())
    for part in (pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Whitespace()):
        tokenizer.pre_tokenizer = part
        assert with_mask_in_text(tokenizer).to_str() == tokenizer.to_str()
