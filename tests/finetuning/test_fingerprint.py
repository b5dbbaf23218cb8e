"""A fingerprint changes with all that decides a result, and with nothing else: finished work is found by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Answer, Examples, SpanExamples, TaskData
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.tasks import get
from tests.finetuning import toys


def hub_directory(path: Path) -> Path:
    """What a fingerprint looks at: files, whatever is in them."""
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize(
    ("file", "changes", "changes_random"),
    [
        ("config.json", True, True),
        ("tokenizer.json", True, True),
        ("vocab.txt", True, True),
        ("model.safetensors", True, False),
        ("model.safetensors.index.json", True, False),
        ("README.md", False, False),
    ],
)
def test_a_hugging_face_directory_is_its_files(tmp_path: Path, file: str, changes: bool, changes_random: bool) -> None:
    path = hub_directory(tmp_path / "hub")
    before = [Origin.of(path, random_init=random_init).fingerprint for random_init in (False, True)]
    assert before[0] != before[1]
    (path / file).write_text("another")
    after = [Origin.of(path, random_init=random_init).fingerprint for random_init in (False, True)]
    assert [a != b for a, b in zip(after, before, strict=True)] == [changes, changes_random]
    assert Origin.of(path.rename(tmp_path / "elsewhere")).fingerprint == after[0]


def test_a_run_is_its_checkpoint_model_and_tokenizer(tmp_path: Path) -> None:
    path = toys.make_run(tmp_path / "run")
    found = {Origin.of(path).fingerprint, Origin.of(path, random_init=True).fingerprint}
    assert found == {Origin.of(path, 5).fingerprint, Origin.of(path, random_init=True).fingerprint}
    found.add(Origin.of(toys.make_run(tmp_path / "wider", ffn_size=72)).fingerprint)
    (path / "tokenizer.json").write_text("{}")
    found |= {Origin.of(path).fingerprint, Origin.of(path, random_init=True).fingerprint}
    assert len(found) == 5
    with pytest.raises(UserError, match="no checkpoint at step 7"):
        Origin.of(path, 7)
    (path / "checkpoints" / "step_5" / "checksums.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="step_5: damaged"):
        Origin.of(path, 5)


def test_data_are_their_texts_labels_splits_and_how_they_are_scored() -> None:
    data = toys.toy(toys.pair_rows, 6, 4)
    train = data.train
    assert isinstance(train, Examples)
    swapped = replace(train, texts=train.texts[::-1])
    others = [
        replace(data, train=replace(train, labels=1 - train.labels)),
        replace(data, train=swapped),
        replace(data, train=train.take([1, 0, 2, 3, 4, 5])),
        replace(data, train=train.take(range(5))),
        replace(data, validation={"other": data.validation["validation"]}),
        replace(data, validation={"validation": train}),
        replace(data, task=replace(data.task, metric="f1")),
        replace(data, task=replace(data.task, labels=("a", "b"))),
    ]
    assert len({one.fingerprint for one in (data, *others)}) == 1 + len(others)
    elsewhere = replace(train, source="copy.jsonl", ids=list("abcdef"))
    assert replace(data, train=elsewhere, notes=("a note",)).fingerprint == data.fingerprint


def test_questions_are_their_texts_and_answers() -> None:
    part = SpanExamples(get("squad_v2"), "train", "x", ["q"], ["who"], ["Ada, Ada"], ["title"], [(Answer("Ada", 0),)])
    changes = (
        {"questions": ["which"]},
        {"contexts": ["Ada; Ada"]},
        {"answers": [(Answer("Ada", 5),)]},
        {"answers": [()]},
    )
    parts = [part, *(replace(part, **change) for change in changes)]  # type: ignore[arg-type]
    assert len({TaskData(part.task, one, {}, ()).fingerprint for one in parts}) == 5
