"""Texts to token ids: the form of inputs, what is cut, where tokens stand in the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from maelm_fast.data.tokenizer import with_mask_in_text
from maelm_fast.errors import UserError
from maelm_fast.text import TextTokenizer
from tests.finetuning import small


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    return TextTokenizer.of_run(small.tokenizer())


@pytest.fixture(scope="module")
def theirs() -> Any:
    return small.wordpiece()


@pytest.fixture(scope="module")
def bert(theirs: Any) -> TextTokenizer:
    return TextTokenizer.of_transformers(theirs, "bert", token_types=2)


def plain(text: str) -> list[int]:
    return small.tokenizer().encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def test_a_run_s_inputs_have_the_form_of_the_released_code(ours: TextTokenizer) -> None:
    firsts, seconds = ["the fox", "a lazy dog"], ["jumps over", "the dog"]
    single = ours.encode((firsts,), 50)
    assert [ids.tolist() for ids in single.ids] == [[0, *plain(a), 2] for a in firsts]
    pair = ours.encode((firsts, seconds), 50)
    expected = [[0, *plain(a), 2, 2, *plain(b), 2] for a, b in zip(firsts, seconds, strict=True)]
    assert [ids.tolist() for ids in pair.ids] == expected
    assert pair.lengths == [len(ids) for ids in expected]
    assert pair.longest == max(pair.lengths)
    assert (pair.cut, pair.cut_tokens, pair.token_types) == (0, 0, None)
    assert all(ids.dtype == np.int32 for ids in pair.ids)


def test_bert_s_inputs_are_what_transformers_makes(bert: TextTokenizer, theirs: Any) -> None:
    firsts, seconds = ["the fox", "Is a dog lazy"], ["a dogs", "the unknown"]
    pair, expected = bert.encode((firsts, seconds), 50), theirs(firsts, seconds, return_token_type_ids=True)
    assert [ids.tolist() for ids in pair.ids] == expected["input_ids"]
    assert pair.token_types is not None
    assert [types.tolist() for types in pair.token_types] == expected["token_type_ids"]
    single = bert.encode((firsts,), 50)
    assert [ids.tolist() for ids in single.ids] == theirs(firsts)["input_ids"]
    assert single.token_types is None
    one_type = TextTokenizer.of_transformers(theirs, "distilbert", token_types=1)
    assert one_type.encode((firsts, seconds), 50).token_types is None


def test_a_tokenizer_file_that_pads_and_cuts(bert: TextTokenizer) -> None:
    padding = small.wordpiece()
    padding.backend_tokenizer.enable_padding(length=16)
    padding.backend_tokenizer.enable_truncation(4)
    tokenizer = TextTokenizer.of_transformers(padding, "bert", token_types=2)
    assert (tokenizer.single, tokenizer.pair) == (bert.single, bert.pair)
    assert tokenizer.encode((["the fox is lazy"],), 50).lengths == [6]


def test_a_run_with_bert_s_tokenizer_keeps_the_released_form(theirs: Any) -> None:
    run = TextTokenizer.of_run(theirs.backend_tokenizer)
    pads_and_masks = (run.cls_id, run.sep_id, run.pad_id, run.mask_id)
    assert pads_and_masks == (2, 3, 0, 4)
    assert run.encode((["the"], ["fox"]), 9).ids[0].tolist() == [2, 5, 3, 3, 6, 3]


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [
        (3, 2, 5, (3, 2)),
        (9, 2, 5, (3, 2)),
        (2, 9, 5, (2, 3)),
        (9, 8, 6, (3, 3)),
        (9, 9, 7, (4, 3)),
        (3, 4, 6, (3, 3)),
        (4, 3, 6, (3, 3)),
        (4, 4, 7, (4, 3)),
        (2, 3, 4, (2, 2)),
    ],
)
def test_the_longer_text_is_cut_first(
    ours: TextTokenizer, first: int, second: int, room: int, kept: tuple[int, int]
) -> None:
    inputs = ours.encode(([" fox" * first], ["dog " * second]), room + 4)
    fox, dog = plain("fox"), plain("dog")
    assert len(fox) == len(dog) == 1
    assert inputs.ids[0].tolist() == [0, *fox * kept[0], 2, 2, *dog * kept[1], 2]
    left_out = first + second - room
    assert (inputs.cut, inputs.cut_tokens, inputs.longest) == (int(left_out > 0), left_out, first + second + 4)


def test_cut_inputs_are_counted(ours: TextTokenizer) -> None:
    inputs = ours.encode((["fox " * n for n in (1, 10, 6, 7)],), 8)
    assert inputs.lengths == [3, 8, 8, 8]
    assert (inputs.cut, inputs.cut_tokens, inputs.longest) == (2, 5, 12)
    with pytest.raises(UserError, match="no room for text beside 4 special tokens"):
        ours.encode((["fox"], ["dog"]), 5)


def test_special_tokens_in_a_text_are_characters(ours: TextTokenizer, bert: TextTokenizer) -> None:
    for tokenizer, text in ((ours, "a <mask> b </s> <pad>"), (bert, "a [MASK] b [SEP] [PAD]")):
        ids = tokenizer.encode(([text],), 90).ids[0]
        special = {tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id}
        assert not special & set(ids[1:-1].tolist())


def test_lines_are_joined_by_one_space_and_offsets_are_of_the_text(ours: TextTokenizer, bert: TextTokenizer) -> None:
    text = "\n  the Fox \r\n\n jumps\tover\u2028a lazy   \n"
    assert ours.tokenize([text])[0].tolist() == plain("the fox jumps\tover a lazy")
    for tokenizer in (ours, bert):
        pieces = tokenizer.tokenize_with_offsets([text, "the fox"])
        for piece, original in zip(pieces, [text, "the fox"], strict=True):
            assert piece.ids.tolist() == tokenizer.tokenize([original])[0].tolist()
            for token, (begin, end) in zip(piece.ids, piece.offsets, strict=True):
                written = tokenizer.decode([token]).strip()
                if token != 1 or tokenizer is ours:  # [UNK]
                    assert original[begin:end].strip().lower() == written
    assert [text[a:b] for a, b in bert.tokenize_with_offsets([text])[0].offsets] == [
        "the",
        "Fox",
        "jumps",
        "over",
        "a",
        "lazy",
    ]
    words = {text[a:b].strip() for a, b in ours.tokenize_with_offsets([text])[0].offsets}
    assert {"the", "Fox", "lazy"} <= words


def test_parts_of_a_text_are_taken_as_they_are(ours: TextTokenizer) -> None:
    word, start = ours.tokenize(["fox"])[0].tolist(), ours.tokenize(["fox"], as_is=True)[0].tolist()
    assert ours.tokenize([" fox"], as_is=True)[0].tolist() == word != start
    assert ours.decode(start) == ours.decode(word) == "fox"
    assert ours.tokenize(["fox"])[0].tolist() == word  # and nothing has changed
    exported = TextTokenizer.of_run(with_mask_in_text(ours.backend))
    assert [exported.tokenize(["fox"], as_is=as_is)[0].tolist() for as_is in (True, False)] == [start, word]


def test_texts_of_several_portions_stay_in_order(ours: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the fox", "a dog", "lazy", "", "over the dog"]
    expected = [ids.tolist() for ids in ours.tokenize(texts)]
    monkeypatch.setattr("maelm_fast.text._AT_ONCE", 2)
    assert [ids.tolist() for ids in ours.tokenize(texts)] == expected == [plain(text) for text in texts]
    assert [piece.ids.tolist() for piece in ours.tokenize_with_offsets(texts)] == expected


def test_places_of_a_pair_s_parts(ours: TextTokenizer, bert: TextTokenizer) -> None:
    for tokenizer in (ours, bert):
        first, second = tokenizer.tokenize(["a lazy dog", "the fox"])
        ids = tokenizer.join(first, second)
        start = tokenizer.second_start(len(first))
        assert ids[start : start + len(second)].tolist() == second.tolist()
        assert len(ids) == len(first) + len(second) + tokenizer.pair.added
    assert bert.token_types(2, 3).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_tokenizers_that_cannot_be_used(theirs: Any) -> None:
    class Slow:
        pass

    class Bare:
        backend_tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))

    Bare.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match=r"slow: its tokenizer is not .*tokenizer.json"):
        TextTokenizer.of_transformers(Slow(), "slow")
    with pytest.raises(UserError, match="puts no token before a text"):
        TextTokenizer.of_transformers(Bare(), "bare")
    with pytest.raises(UserError, match="not valid Unicode"):
        TextTokenizer.of_transformers(theirs, "bert").encode((["a \ud800"],), 9)
