"""Windows, targets, loss, decoding and the whole of SpanProblem, against slower calculations and a learnable toy."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from maelm_fast.batch import layout_of
from maelm_fast.config import ModelConfig
from maelm_fast.data.tokenizer import BOS, EOS, special_ids, train_tokenizer
from maelm_fast.encoders import PackedEncoder, TokenBatch
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.decoding import decode, error_examples
from maelm_fast.finetuning.examples import Answer, SpanExamples, TaskData
from maelm_fast.finetuning.problem import update_order
from maelm_fast.finetuning.spans import SpanProblem, legal_rows, span_loss
from maelm_fast.finetuning.tasks import get
from maelm_fast.finetuning.windows import Windows, cut_windows
from maelm_fast.model.maelm import MaeLm
from maelm_fast.text import TextTokenizer
from tests.conftest import WORDS

UNICODE = (
    "Ein Café  in  Zürich, e\u0301te\u0301 \u65e5\u672c\u8a9e; İstanbul \U0001f468\u200d\U0001f469 (1895-1943).  Ende"
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)] * 3 + ["Café Zürich (1895)."] * 3, 420, cased=False)


@pytest.fixture(scope="module")
def tokenizer(bpe: Tokenizer) -> TextTokenizer:
    return TextTokenizer.of_run(bpe)


@pytest.fixture(scope="module")
def bert() -> TextTokenizer:
    """Words as BERT has them: types, one separator between, accents stripped."""
    vocabulary = {name: i for i, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "(", ")"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made = SimpleNamespace(backend_tokenizer=backend, sep_token_id=3, pad_token_id=0, mask_token_id=4)
    return TextTokenizer.of_transformers(made, "bert", token_types=2)


def examples(rows: list[tuple[str, str, list[str]]], split: str = "train") -> SpanExamples:
    """From (question, context, answers), each answer at its first occurrence."""
    return SpanExamples(
        get("squad_v2"),
        split,
        "test",
        [f"{split}{i}" for i in range(len(rows))],
        [question for question, _, _ in rows],
        [context for _, context, _ in rows],
        ["title"] * len(rows),
        [tuple(Answer(text, context.index(text)) for text in answers) for _, context, answers in rows],
    )


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def random_examples(seed: int, count: int = 12) -> SpanExamples:
    draw, rows = random.Random(seed), []
    for i in range(count):
        context = words(draw, draw.choice([2, 15, 60]))
        parts = context.split()
        first = draw.randrange(len(parts))
        rows.append((words(draw, 3), context, [] if i % 3 == 0 else [" ".join(parts[first : first + 3])]))
    return examples(rows)


def tiny_encoder(bpe: Tokenizer) -> PackedEncoder:
    config = ModelConfig(
        vocab_size=bpe.get_vocab_size(),
        max_positions=64,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        ffn_size=128,
        dropout=0.0,
        init_std=0.1,
        relative_init="local",
        decoder="none",
    )
    model = MaeLm(config, special_ids(bpe)["mask"])
    return PackedEncoder(model.encoder, config, TextTokenizer.of_run(bpe), "tiny")


@pytest.mark.parametrize(("size", "step"), [(24, 5), (24, 9), (64, 16), (512, 128)])
def test_windows_are_those_of_the_tokenizers_library(bpe: Tokenizer, bert: TextTokenizer, size: int, step: int) -> None:
    """Which truncates the second text with an overlap, that is, room less step; ours allows a step beyond the room."""
    data = random_examples(0)
    for tokenizer in (TextTokenizer.of_run(bpe), bert):
        windows = cut_windows(data, tokenizer, size, step, question_length=8)
        theirs = Tokenizer.from_str(tokenizer.backend.to_str())
        expected: list[list[int]] = []
        expected_types: list[list[int]] = []
        for question, context in zip(data.questions, data.contexts, strict=True):
            room = size - tokenizer.pair.added - len(theirs.encode(question, add_special_tokens=False).ids)
            theirs.enable_truncation(size, stride=max(room - step, 0), strategy="only_second")
            encoding = theirs.encode(question, context)
            theirs.no_truncation()
            for window in (encoding, *encoding.overflowing):
                expected.append(window.ids)
                expected_types.append(window.type_ids)
        assert [ids.tolist() for ids in windows.inputs.ids] == expected
        assert max(windows.inputs.lengths) <= size
        if tokenizer is bert:
            assert windows.inputs.token_types is not None
            assert [types.tolist() for types in windows.inputs.token_types] == expected_types
        else:
            assert windows.inputs.token_types is None


def test_the_form_is_the_released_one(tokenizer: TextTokenizer) -> None:
    windows = cut_windows(examples([("time", "year people", [])]), tokenizer, 64, 16, 8)
    question, passage = tokenizer.tokenize(["time", "year people"])
    assert windows.inputs.ids[0].tolist() == [BOS, *question, EOS, EOS, *passage, EOS]
    assert windows.begin[0] == 3 + len(question)
    assert legal_rows(windows, [0]).tolist() == [
        *([True] + [False] * (2 + len(question)) + [True] * len(passage) + [False])
    ]


def test_long_questions_are_cut_and_counted_and_a_window_needs_room(tokenizer: TextTokenizer) -> None:
    data = examples([("time year people way day", "school state", ["state"]), ("time", "school", [])])
    length = len(tokenizer.tokenize([data.questions[0]])[0])
    windows = cut_windows(data, tokenizer, 64, 16, question_length=length - 2)
    assert (windows.inputs.cut, windows.inputs.cut_tokens) == (1, 2)
    kept = tokenizer.tokenize([data.questions[0]])[0][: length - 2].tolist()
    assert windows.inputs.ids[0].tolist()[1 : length - 1] == kept
    assert windows.report()["cut"] == 1
    with pytest.raises(UserError, match=r"question 'train0' leaves no room .* raise --max-length"):
        cut_windows(data, tokenizer, length + 4, 16, question_length=length)


def test_targets_point_at_the_answer_or_at_cls(tokenizer: TextTokenizer) -> None:
    for seed in range(5):
        data = random_examples(seed)
        windows = cut_windows(data, tokenizer, 24, 6, 8)
        found = set()
        for window, question in enumerate(windows.question):
            begin, first, count = windows.begin[window], windows.first[window], windows.count[window]
            start, end = windows.targets[window]
            if not data.answers[question]:
                assert (start, end) == (0, 0)
                continue
            answer = data.answers[question][0]
            span = windows.passage_of(question).span(answer)
            if start:
                assert begin <= start <= end < begin + count
                assert (start - begin + first, end - begin + first) == span
                text = windows.text(question, *(int(row - begin + first) for row in (start, end)))
                assert text == answer.text
                found.add(question)
            else:
                assert span[0] < first or span[1] >= first + count
        assert windows.report()["answers_in_no_window"] == sum(map(bool, data.answers)) - len(found)


def test_an_answer_longer_than_a_window_is_counted(tokenizer: TextTokenizer) -> None:
    context = words(random.Random(0), 40)
    windows = cut_windows(examples([("time", context, [context])]), tokenizer, 20, 6, 8)
    assert not windows.targets.any()
    assert windows.report()["answers_in_no_window"] == 1


@pytest.mark.parametrize("kind", ["ours", "bert"])
def test_spans_are_pieces_of_the_original_text(kind: str, tokenizer: TextTokenizer, bert: TextTokenizer) -> None:
    """Every piece of an awkward text is covered by its tokens, and by no fewer."""
    text = f"  {UNICODE}\n\n  zwei\tZeilen\r\n"
    windows = cut_windows(examples([("time", text, [])]), tokenizer if kind == "ours" else bert, 512, 128, 64)
    passage = windows.passages[0]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            piece = text[start:end]
            if not piece.strip():
                continue
            first, last = passage.span(Answer(piece, start))
            assert piece.strip() in text[passage.starts[first] : passage.ends[last]]
            left, right = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
            assert passage.ends[first] > left
            assert passage.starts[last] < right
            assert first == 0 or passage.ends[first - 1] <= left
            assert last == len(passage.ids) - 1 or passage.starts[last + 1] >= right


@pytest.mark.parametrize(
    "answer",
    ["Café", "Zürich", "e\u0301te\u0301", "\u65e5\u672c\u8a9e", "İstanbul", "1895-1943", "Ein", "zwei"],
)
def test_whole_words_are_recovered_exactly(answer: str, tokenizer: TextTokenizer) -> None:
    text = f"  {UNICODE}\n\n  zwei\tZeilen "
    data = examples([("time", text, [answer])])
    windows = cut_windows(data, tokenizer, 512, 128, 64)
    first, last = windows.passages[0].span(data.answers[0][0])
    assert windows.text(0, first, last) == answer
    assert windows.report()["answers_not_whole_tokens"] == 0


def test_an_answer_inside_a_token_is_counted(tokenizer: TextTokenizer) -> None:
    data = examples([("time", "many people here", ["peopl"]), ("time", "many people here", ["people"])])
    windows = cut_windows(data, tokenizer, 64, 16, 8)
    assert windows.text(0, *windows.passages[0].span(data.answers[0][0])) == "people"
    assert windows.report()["answers_not_whole_tokens"] == 1
    assert len(windows.passages) == 1  # shared


def max_context_by_hand(windows: Windows) -> list[bool]:
    result = []
    for window, question in enumerate(windows.question):
        rivals = [i for i, other in enumerate(windows.question) if other == question]
        for token in range(windows.first[window], windows.first[window] + windows.count[window]):
            best, best_score = -1, -1.0
            for rival in rivals:
                low, high = windows.first[rival], windows.first[rival] + windows.count[rival] - 1
                if low <= token <= high:
                    score = min(token - low, high - token) + 0.01 * windows.count[rival]
                    if score > best_score:
                        best, best_score = rival, score
            result.append(best == window)
    return result


@pytest.mark.parametrize(("size", "step"), [(24, 3), (24, 7), (40, 16), (512, 128)])
def test_each_token_is_taken_from_the_window_with_most_context(tokenizer: TextTokenizer, size: int, step: int) -> None:
    data = random_examples(1)
    windows = cut_windows(data, tokenizer, size, step, 8)
    assert windows.max_context().tolist() == max_context_by_hand(windows)
    tokens = sum(len(windows.passage_of(i).ids) for i in range(len(data)))
    assert windows.max_context().sum() == tokens  # each once


def test_the_loss_and_its_gradient_are_those_of_padded_windows(tokenizer: TextTokenizer) -> None:
    windows = cut_windows(random_examples(2), tokenizer, 24, 6, 8)
    indices = np.array([5, 0, 3, 9, 2])
    lengths = [windows.inputs.lengths[i] for i in indices]
    legal, targets = legal_rows(windows, indices), windows.targets[indices]
    assert targets.any()
    assert not targets.all()
    logits = (5 * torch.randn(sum(lengths), 2)).requires_grad_()
    loss = span_loss(logits, layout_of(lengths), torch.from_numpy(legal), torch.from_numpy(targets))
    (gradient,) = torch.autograd.grad(loss, logits)

    padded_logits = nn.utils.rnn.pad_sequence(logits.double().split(lengths), True)
    mask = nn.utils.rnn.pad_sequence(torch.from_numpy(legal).split(lengths), True)
    masked = padded_logits.masked_fill(~mask[..., None], float("-inf"))
    each = [F.cross_entropy(masked[..., k], torch.from_numpy(targets[:, k])) for k in (0, 1)]
    expected = (each[0] + each[1]) / 2
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not gradient[~torch.from_numpy(legal)].any()


def decode_by_hand(
    windows: Windows, logits: np.ndarray, answer_length: int, n_best: int
) -> list[tuple[str, float] | None]:
    """The released procedure, window by window and pair by pair; None if it finds no answer."""
    context, results = max_context_by_hand(windows), []
    lengths = windows.inputs.lengths
    for question in range(len(windows.examples)):
        best, null = None, float("inf")
        for window in np.flatnonzero(windows.question == question):
            rows = logits[sum(lengths[:window]) : sum(lengths[: window + 1])].astype(np.float64)
            begin, first, count = windows.begin[window], windows.first[window], windows.count[window]
            shown = context[sum(windows.count[:window]) :]
            null = min(null, rows[0, 0] + rows[0, 1])
            legal = [0, *range(begin, begin + count)]
            tops = [sorted(legal, key=lambda row, k=k: -rows[row, k])[:n_best] for k in (0, 1)]
            for start in tops[0]:
                for end in tops[1]:
                    if start == 0 or end < start or end - start >= answer_length or not shown[start - begin]:
                        continue
                    score = rows[start, 0] + rows[end, 1]
                    if best is None or score > best[0]:
                        best = score, windows.text(question, start - begin + first, end - begin + first)
        results.append(None if best is None else (best[1], null - best[0]))
    return results


@pytest.mark.parametrize(("size", "n_best", "answer_length"), [(24, 20, 30), (24, 4, 30), (24, 2, 2), (512, 20, 5)])
def test_decoding_is_the_search_over_all_pairs(
    tokenizer: TextTokenizer, size: int, n_best: int, answer_length: int
) -> None:
    without = 0
    for seed in range(4):
        windows = cut_windows(random_examples(seed), tokenizer, size, 6, 8)
        logits = np.random.default_rng(seed).normal(size=(sum(windows.inputs.lengths), 2)).astype(np.float32)
        decoded = decode(windows, logits, answer_length, n_best)
        for found, text, odds in zip(
            decode_by_hand(windows, logits, answer_length, n_best), decoded.texts, decoded.null_odds, strict=True
        ):
            if found is None:
                without += 1
                assert text  # there is an answer all the same
                assert np.isfinite(odds)
            else:
                assert text == found[0]
                assert odds == pytest.approx(found[1], abs=1e-5)
    assert (without > 0) == (n_best == 2)


def test_white_space_that_is_a_token_is_no_answer(tokenizer: TextTokenizer) -> None:
    windows = cut_windows(examples([("time", "year    people", [])]), tokenizer, 64, 16, 8)
    passage = windows.passages[0]
    blank = [
        i
        for i, (a, b) in enumerate(zip(passage.starts, passage.ends, strict=True))
        if not "year    people"[a:b].strip()
    ]
    assert blank
    logits = np.zeros((windows.inputs.lengths[0], 2), dtype=np.float32)
    logits[windows.begin[0] + np.array(blank)] = 9.0
    assert decode(windows, logits, 30).texts[0].strip()


def test_errors_are_counted_and_shown_worst_first() -> None:
    context = "The quick brown fox jumps over the lazy dog."
    data = examples(
        [
            ("a", context, []),
            ("b", context, []),
            ("c", context, ["fox"]),
            ("d", context, ["dog"]),
            ("e", context, ["brown fox"]),
            ("f", context, ["lazy"]),
        ],
        "validation",
    )
    decoded = SimpleNamespace(
        texts=["fox", "dog", "the fox", "dog", "fox", "quick"],
        starts=np.zeros(6, int),
        null_odds=np.array([-1.0, 2.0, -3.0, 4.0, -2.0, -1.0]),
    )
    errors = error_examples(data, decoded, 0.0, around=6)
    assert errors["counts"] == {
        "right_answers": 1,
        "wrong_spans": 2,
        "missed": 1,
        "right_refusals": 1,
        "false_answers": 1,
    }
    assert [row["id"] for row in errors["wrong_spans"]] == ["validation5", "validation4"]  # F1 0, then 2/3
    assert errors["wrong_spans"][0]["around_text"] == "The [[quick]] brown..."
    assert errors["missed"][0]["answers"] == ["dog"]
    assert errors["false_answers"][0]["null_odds"] == -1.0
    assert [row["id"] for row in error_examples(data, decoded, 3.0)["false_answers"]] == ["validation0", "validation1"]


class Oracle(nn.Module):
    """Logits that point at each window's target, whatever order the windows come in."""

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.targets = {ids.tobytes(): t for ids, t in zip(windows.inputs.ids, windows.targets, strict=True)}

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        parts = []
        for ids in batch.ids.split(list(batch.layout.lengths)):
            logits = torch.zeros(len(ids), 2)
            start, end = self.targets[ids.numpy().tobytes()]
            logits[start, 0] = logits[end, 1] = 10.0
            parts.append(logits)
        return torch.cat(parts)


def test_an_oracle_scores_100(bpe: Tokenizer) -> None:
    data = TaskData(get("squad_v2"), random_examples(3), {"validation": random_examples(4, 30)}, ())
    config = FinetuneConfig(max_length=24, stride=6, question_length=8)
    problem = SpanProblem(data, tiny_encoder(bpe), config)
    validation = data.validation["validation"]
    assert isinstance(validation, SpanExamples)
    oracle = Oracle(problem.validation["validation"])
    evaluation = problem.evaluate(oracle, torch.device("cpu"), "fp32")
    metrics = evaluation.metrics["validation"]
    reach = problem.truncation["validation"]["answers_in_no_window"]
    assert reach == 0
    assert metrics["exact"] == metrics["best_f1"] == metrics["NoAns_f1"] == 100.0
    assert set(get("squad_v2").metrics) <= set(metrics)
    assert [row["id"] for row in evaluation.predictions] == validation.ids
    for row, answers in zip(evaluation.predictions, validation.answers, strict=True):
        assert row["label"] == [answer.text for answer in answers]
        assert row["prediction"] == (row["label"][0] if row["label"] else "")
        assert row["text"]
        assert (row["null_odds"] > 0) == (not answers)
    counts = evaluation.details["errors"]["validation"]["counts"]
    assert counts["right_answers"] + counts["right_refusals"] == 30
    assert len(problem.lengths) == problem.train_size == len(problem.train)
    assert len(problem.validation_inputs) == len(problem.validation["validation"])


def test_outputs_that_are_not_finite_are_an_error(bpe: Tokenizer) -> None:
    data = TaskData(get("squad_v2"), random_examples(3), {"validation": random_examples(4)}, ())
    problem = SpanProblem(data, tiny_encoder(bpe), FinetuneConfig())
    model = problem.model(tiny_encoder(bpe), FinetuneConfig())
    nn.init.constant_(model.head.out.bias, float("nan"))
    with pytest.raises(UserError, match="not finite"):
        problem.evaluate(model, torch.device("cpu"), "fp32")


MARKERS = WORDS[:2]


def toy(seed: int, count: int, split: str) -> SpanExamples:
    """The answer is the word after the marker that the question names; half of the passages have the other one only."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        asked, other = draw.sample(MARKERS, 2)
        passage = draw.sample(WORDS[2:], 6)
        first, second = draw.sample([0, 2, 4], 2)
        passage[first] = other
        if i % 2 == 0:
            passage[second] = asked
        rows.append((asked, " ".join(passage), [passage[second + 1]] if i % 2 == 0 else []))
    return examples(rows, split)


def test_a_tiny_encoder_learns_to_find_the_word_after_a_marker(bpe: Tokenizer) -> None:
    data = TaskData(get("squad_v2"), toy(0, 4000, "train"), {"validation": toy(1, 200, "validation")}, ())
    config, encoder, cpu = FinetuneConfig(max_length=64), tiny_encoder(bpe), torch.device("cpu")
    problem = SpanProblem(data, encoder, config)
    model = problem.model(encoder, config)
    before = problem.evaluate(model, cpu, "fp32").metrics["validation"]
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3, fused=True)
    updates = [indices for epoch in range(3) for indices in update_order(problem.train_size, 64, 0, epoch)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=len(updates), pct_start=0.15)
    model.train()
    for indices in updates:
        optimiser.zero_grad()
        problem.loss(model, indices, cpu, None).backward()
        optimiser.step()
        schedule.step()
    after = problem.evaluate(model, cpu, "fp32").metrics["validation"]
    assert before["exact"] < 60
    assert after["exact"] > 90
    assert after["HasAns_exact"] > 85
    assert after["NoAns_exact"] > 85
