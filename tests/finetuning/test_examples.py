import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Answer, Examples, read_task
from maelm_fast.finetuning.tasks import custom, get, with_range

ROWS = [
    {"sentence": "a fine film", "label": 1, "idx": 0},
    {"sentence": 'a "dull" one, caf\u00e9', "label": 0, "idx": 1},
    {"sentence": "so, so", "label": 0, "idx": 5},
]
PASSAGE = "Ada wrote the first programme. Ada was born in London."


def question(identity="q1", text="London", start=47, **changes):
    answers = {"text": [text], "answer_start": [start]} if text else {"text": [], "answer_start": []}
    row = {"id": identity, "title": "Ada", "context": PASSAGE, "question": "Where?", "answers": answers}
    return row | changes


def write(path, rows, names=None):
    """`rows` in the format of the path's suffix; names: class names that a parquet file gives to column label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pa.Table.from_pylist(rows)
        if names:
            features = {"label": {"names": names, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".tsv":
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("\n".join("\t".join(str(cell) for cell in line) for line in lines) + "\n", encoding="utf-8")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


def splits(root, rows, suffix=".jsonl", validation=None, **options):
    write(root / f"train{suffix}", rows, **options)
    write(root / f"validation{suffix}", validation or rows, **options)


def fails(match, task, data, *args, **options):
    with pytest.raises(UserError, match=match) as caught:
        read_task(task, str(data), *args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".tsv"])
def test_every_format_gives_the_same_examples(tmp_path, suffix):
    splits(tmp_path / "sst2", ROWS, suffix)
    data = read_task(get("sst2"), str(tmp_path))
    train = data.train
    assert isinstance(train, Examples)
    assert train.texts == ([row["sentence"] for row in ROWS],)
    assert (train.labels.tolist(), train.labels.dtype) == ([1, 0, 0], np.int64)
    assert train.ids == ["0", "1", "5"]
    assert list(data.validation) == ["validation"]
    few = train.take([2, 0])
    assert (few.ids, few.texts, few.labels.tolist()) == (["5", "0"], (["so, so", "a fine film"],), [0, 1])
    assert read_task(get("sst2"), str(tmp_path / "sst2")).train.ids == train.ids


def test_quoted_csv_fields_over_several_lines_and_their_places(tmp_path):
    splits(tmp_path, [{"sentence": 'one\n"two"', "label": 1}, {"sentence": "", "label": 0}], ".csv")
    fails(r"train.csv: line 4: 'sentence' is empty", get("sst2"), tmp_path)
    splits(tmp_path, [{"sentence": 'one\n"two"', "label": 1}, {"sentence": "x", "label": 0}], ".csv")
    assert read_task(get("sst2"), str(tmp_path)).train.texts[0][0] == 'one\n"two"'


def test_a_tsv_file_keeps_quotation_marks_and_says_so(tmp_path):
    splits(tmp_path, [{"sentence": '"he said ""no"""', "label": 1}, {"sentence": '"yes', "label": 0}], ".tsv")
    data = read_task(get("sst2"), str(tmp_path))
    assert data.train.texts[0] == ['"he said ""no"""', '"yes']
    assert any("1 fields in quotation marks" in note for note in data.notes)


def test_labels_by_name_by_id_and_as_the_file_describes_them(tmp_path):
    for labels in ([1, 0], ["positive", "negative"], ["1", "0"], [1.0, 0.0], ["1.0", "0.0"]):
        splits(tmp_path, [{"sentence": "x", "label": label} for label in labels], ".parquet")
        assert read_task(get("sst2"), str(tmp_path)).train.labels.tolist() == [1, 0]
    rows = [{"sentence": "x", "label": 0}, {"sentence": "y", "label": 1}]
    splits(tmp_path, rows, ".parquet", names=["positive", "negative"])  # another order: the names count
    assert read_task(get("sst2"), str(tmp_path)).train.labels.tolist() == [1, 0]
    splits(tmp_path, rows, ".parquet", names=["bad", "good"])
    fails("unknown label 'bad': the classes are negative, positive", get("sst2"), tmp_path)


def test_which_file_is_taken(tmp_path):
    write(tmp_path / "validation.jsonl", ROWS)
    fails(r"no file of the split 'train'.*only validation.jsonl: name it with --train", get("sst2"), tmp_path)
    write(tmp_path / "train-subset.jsonl", ROWS)
    data = read_task(get("sst2"), str(tmp_path))
    assert any("train-subset.jsonl, for want of a file named train.jsonl" in note for note in data.notes)
    assert any("train: 3 examples where the official split has 67,349" in note for note in data.notes)
    write(tmp_path / "train-extra.jsonl", ROWS[:1])
    fails("several files for the split 'train': train-extra.jsonl, train-subset.jsonl", get("sst2"), tmp_path)
    both = read_task(get("sst2"), str(tmp_path), train=["train-subset.jsonl", str(tmp_path / "train-extra.jsonl")])
    assert both.train.ids == ["0", "1", "2", "3"]  # both files have a row 0
    write(tmp_path / "train.jsonl", ROWS[:2])
    assert len(read_task(get("sst2"), str(tmp_path)).train) == 2
    fails("no file nothing.csv", get("sst2"), tmp_path, train=["nothing.csv"])
    fails("given twice", get("sst2"), tmp_path, train=["validation.jsonl"])
    fails("does not exist", get("sst2"), tmp_path / "nowhere")
    fails("is a file: give its directory", get("sst2"), tmp_path / "train.jsonl")


def test_complete_sets_of_shards_are_read_in_order(tmp_path):
    for i, row in enumerate(ROWS):
        write(tmp_path / f"train-0000{i}-of-00003.parquet", [row])
    write(tmp_path / "dev.tsv", ROWS)
    assert read_task(get("sst2"), str(tmp_path)).train.labels.tolist() == [1, 0, 0]
    assert not any(
        "for want of" in note and note.startswith("train") for note in read_task(get("sst2"), str(tmp_path)).notes
    )
    (tmp_path / "train-00001-of-00003.parquet").rename(tmp_path / "train-00001-of-00003.json")
    write(tmp_path / "train-00000-of-00003.json", ROWS)
    (tmp_path / "train-00002-of-00003.parquet").unlink()
    fails("several files for the split 'train'", get("sst2"), tmp_path)  # three, but not 0, 1 and 2


def test_shards_of_another_name_are_noted(tmp_path):
    write(tmp_path / "train-subset-00000-of-00001.jsonl", ROWS)
    write(tmp_path / "validation-00000-of-00002.jsonl", ROWS)
    notes = read_task(get("sst2"), str(tmp_path)).notes
    assert "train: train-subset-00000-of-00001.jsonl, for want of a file named train.jsonl" in notes
    assert "validation: validation-00000-of-00002.jsonl, for want of a file named validation.jsonl" in notes


def test_mnli_goes_on_without_its_mismatched_half_and_says_so(tmp_path):
    rows = [{"premise": "p", "hypothesis": f"h{i}", "label": i % 3} for i in range(6)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "validation_matched.jsonl", rows)
    data = read_task(get("mnli"), str(tmp_path))
    assert list(data.validation) == ["validation_matched"]
    assert any(note.startswith("validation_mismatched: not there") for note in data.notes)
    write(tmp_path / "my_mm.jsonl", rows[:2])
    write(tmp_path / "dev_mismatched_a.jsonl", rows[:3])
    data = read_task(get("mnli"), str(tmp_path), validation=["dev_mismatched_a.jsonl", "my_mm.jsonl"])
    assert {split: len(part) for split, part in data.validation.items()} == {
        "validation_matched": 2,
        "validation_mismatched": 3,
    }


def test_limit_is_a_fixed_subset_and_smaller_ones_lie_within_it(tmp_path):
    splits(tmp_path, [{"sentence": f"text {i}", "label": i % 2} for i in range(50)])
    few, more = (read_task(get("sst2"), str(tmp_path), limit=limit) for limit in (5, 20))
    assert set(few.train.ids) < set(more.train.ids)
    assert len(more.train) == 20
    assert more.train.ids != [str(i) for i in range(20)]
    assert more.train.ids == read_task(get("sst2"), str(tmp_path), limit=20).train.ids
    assert any("20 of its 50" in note for note in more.notes)
    assert len(more.validation["validation"]) == 50
    assert len(read_task(get("sst2"), str(tmp_path), limit=500).train) == 50
    fails("--limit", get("sst2"), tmp_path, limit=0)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"line 3: unknown label '7': the classes are negative, positive, or their ids from 0 to 1", {"label": 7}),
        (r"line 3: unknown label 'neutral'", {"label": "neutral"}),
        (r"line 3: label -1 stands for a hidden one", {"label": -1}),
        (r"line 3 has no label", {"label": None}),
        (r"line 3 has no label", {"label": " "}),
        (r"line 3: label 0.5 is a float", {"label": 0.5}),
        (r"line 3: label \[1\] is a list", {"label": [1]}),
        (r"line 3: 'sentence' is empty", {"sentence": " \n"}),
        (r"line 3: 'sentence' is not text but null", {"sentence": None}),
        (r"line 3: 'sentence' is not text but int 5", {"sentence": 5}),
        (r"line 3: 'sentence' holds half a surrogate", {"sentence": "x\ud800"}),
    ],
)
def test_a_faulty_row_is_named(tmp_path, match, change):
    splits(tmp_path, [ROWS[0], ROWS[1] | change])
    fails(match, get("sst2"), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("train.jsonl", '{"sentence": "a", "label": 1}\n{"sentence": "b", "lab', "train.jsonl: line 2 is not JSON"),
        ("train.jsonl", '{"sentence": "a"}\n', "line 1 has no field 'label', only sentence"),
        ("train.jsonl", "[1]\n", "line 1 is not an object"),
        ("train.jsonl", "\n", "has no rows"),
        ("train.json", "{", "train.json is not JSON: .* line 1"),
        ("train.json", '[\n{"sentence": "a", "label": 1},\n{"sentence": "b"', "is not JSON: .* line 3"),
        ("train.json", '{"sentence": "a", "label": 1}\n{"sentence": "b"', "train.json: line 2 is not JSON"),
        ("train.json", '"text"', "neither a list"),
        ("train.csv", "", "has no rows"),
        ("train.csv", "sentence,label\n", "has no rows"),
        ("train.csv", "sentence,target\na,1\n", "line 2 has no field 'label', only sentence, target"),
        ("train.csv", "sentence,label\na,1\nb\n", "line 3 has 1 fields and the first line 2"),
        ("train.csv", 'sentence,label\na,1\n"b,0\nc,0\n', "line 3 is damaged"),
        ("train.tsv", "sentence\tlabel\na\t1\tx\n", "line 2 has 3 fields"),
        ("train.tsv", "sentence\tlabel\tlabel\na\t1\t1\n", "names column 'label' twice"),
        ("train.tsv", b"sentence\tlabel\na\xff\t1\n", "line 2, byte 16 of the text: not UTF-8"),
        ("train.parquet", b"PAR1 nothing", "cannot be read as parquet"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    write(tmp_path / "validation.jsonl", ROWS)
    fails(match, get("sst2"), tmp_path)


def test_a_missing_column_lists_those_there_are(tmp_path):
    splits(tmp_path, [{"text": "x", "label": 1}], ".parquet")
    fails("no column 'sentence', only text, label", get("sst2"), tmp_path)


def test_a_byte_cut_off_a_parquet_file(tmp_path):
    splits(tmp_path, ROWS, ".parquet")
    whole = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(whole[:-1])
    fails("train.parquet cannot be read as parquet", get("sst2"), tmp_path)


def test_qqp_may_have_an_empty_question_and_counts_it(tmp_path):
    rows = [{"question1": "a?", "question2": text, "label": 0} for text in ("", "b?")]
    splits(tmp_path, rows)
    assert any("train: 1 of 2 rows have an empty text" in note for note in read_task(get("qqp"), str(tmp_path)).notes)
    splits(tmp_path, [{"question1": " ", "question2": "", "label": 0}])
    fails("'question1' is empty", get("qqp"), tmp_path)


def test_scores_and_their_faults(tmp_path):
    def rows(label):
        return [
            {"sentence1": "a", "sentence2": "b", "label": 2.5},
            {"sentence1": "a", "sentence2": "b", "label": label},
        ]

    splits(tmp_path, rows("3.25"), ".csv")
    labels = read_task(get("stsb"), str(tmp_path)).train.labels
    assert (labels.tolist(), labels.dtype) == ([2.5, 3.25], np.float32)
    for label, match in [
        (5.5, "line 3: label 5.5 lies outside 0 to 5"),
        (-1, "line 3: label -1 lies outside 0 to 5: -1 stands for a hidden"),
        ("high", "line 3: label 'high' is not a number"),
        (10**400, "line 3: label '1000"),
        (1e39, "line 3: label 1e[+]39 is not finite in fp32"),
        (True, "line 3: label 'True' is not a number"),
        (None, "line 3 has no label"),
    ]:
        splits(tmp_path / "faulty", rows(label))
        fails(match, get("stsb"), tmp_path / "faulty")
    splits(tmp_path / "endless", rows("inf"), ".csv")
    fails("label inf is not finite", get("stsb"), tmp_path / "endless")


def test_classes_of_a_users_file(tmp_path):
    task = custom("classification", ["body"], "topic")
    for labels, names, ids in [
        (["sport", "art", "sport", "war"], ("art", "sport", "war"), [1, 0, 1, 2]),
        ([0, 1, 2, 1], ("0", "1", "2"), [0, 1, 2, 1]),
        ([5, 10, 1, 5], ("1", "5", "10"), [1, 2, 0, 1]),
        ([True, False, True, True], ("False", "True"), [1, 0, 1, 1]),
    ]:
        splits(tmp_path, [{"body": "x", "topic": label} for label in labels], ".parquet")
        data = read_task(task, str(tmp_path))
        assert data.task.labels == names
        assert data.train.task is data.task
        assert data.train.labels.tolist() == ids
        assert ("f1" in data.task.metrics) == (len(names) == 2)
    rows = [{"body": "x", "topic": topic} for topic in ("a", "b")]
    splits(tmp_path, rows, ".parquet", validation=[{"body": "x", "topic": "c"}])
    fails("validation.parquet: row 1: unknown label 'c': the classes are a, b", task, tmp_path)
    splits(tmp_path, rows[:1], ".parquet")
    fails("leaves nothing to learn", task, tmp_path)
    splits(tmp_path / "scores", [{"body": "x", "topic": score} for score in ("0.5", "1", "3.25")], ".csv")
    fails("numbers with fractions.*use --task regression", task, tmp_path / "scores")
    splits(tmp_path, rows, ".parquet", validation=rows[:1])
    assert "validation: no example of class b" in read_task(task, str(tmp_path)).notes


def test_class_names_that_a_users_file_describes(tmp_path):
    task = custom("classification", ["body"], "label")
    splits(tmp_path, [{"body": "x", "label": i} for i in (2, 0)], ".parquet", names=["no", "maybe", "yes"])
    data = read_task(task, str(tmp_path))
    assert data.task.labels == ("no", "maybe", "yes")
    assert data.train.labels.tolist() == [2, 0]
    assert "train: no example of class maybe" in data.notes


def test_scores_of_a_users_file(tmp_path):
    rows = [{"a": "x", "b": "y", "id": "same", "score": score} for score in (-2, 0.5, 8)]
    splits(tmp_path, rows)
    data = read_task(custom("regression", ["a", "b"], "score"), str(tmp_path))
    assert data.task.label_range == (-2.0, 8.0)
    assert data.train.ids == ["0", "1", "2"]
    assert "train: not every row has an id of its own, so rows go by their numbers from 0" in data.notes
    given = with_range(custom("regression", ["a"], "score"), (0, 10))
    fails("line 1: label -2 lies outside 0 to 10", given, tmp_path)
    splits(tmp_path, rows[:1])
    fails("there is nothing to learn", custom("regression", ["a"], "score"), tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_questions_with_answers_repaired_and_counted(tmp_path, suffix):
    rows = [question(), question("q2", text=None), question("q3", start=3), question("q4", text="Ada", start=31)]
    validation = [*rows, question("q5", text="Paris")]
    splits(tmp_path, rows, suffix, validation=validation)
    data = read_task(get("squad_v2"), str(tmp_path))
    assert data.train.ids == ["q1", "q2", "q3", "q4"]
    assert data.train.answers == [(Answer("London", 47),), (), (Answer("London", 47),), (Answer("Ada", 31),)]
    assert data.train.contexts[0] is data.train.contexts[3]
    assert data.train.titles == ["Ada"] * 4
    assert data.validation["validation"].answers[4] == (Answer("Paris", -1),)
    assert any("validation: 1 of 4 answers do not occur in their passage" in note for note in data.notes)
    assert any("train: 1 of 3 answers are not at their offset" in note for note in data.notes)
    assert data.train.take([1]).answers == [()]


def test_squads_own_nesting(tmp_path):
    answers = [{"text": "London", "answer_start": 47}, {"text": "in London", "answer_start": 44}]
    asked = [{"id": "q1", "question": "Where?", "answers": answers}, {"id": "q2", "question": "When?", "answers": []}]
    articles = {"version": "v2.0", "data": [{"title": "Ada", "paragraphs": [{"context": PASSAGE, "qas": asked}]}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        write(tmp_path / name, articles)
    data = read_task(get("squad_v2"), str(tmp_path))
    expected = [(Answer("London", 47), Answer("in London", 44)), ()]
    assert data.train.answers == data.validation["validation"].answers == expected
    del asked[0]["question"]
    write(tmp_path / "train-v2.0.json", articles)
    fails("article 1 is not as in SQuAD's files", get("squad_v2"), tmp_path)


@pytest.mark.parametrize(
    ("match", "row"),
    [
        ("line 3: the passage lacks the answer 'Paris'", question("q2", text="Paris")),
        ("line 3: the answers are not as in SQuAD", question("q2", answers={"text": ["London"]})),
        ("line 3: the answers are not as in SQuAD", question("q2", answers={"text": ["London"], "answer_start": []})),
        ("line 3: the answers are not as in SQuAD", question("q2", answers=None)),
        ("line 3: the answers are not as in SQuAD", question("q2", answers="")),
        ("line 3: an answer is empty", question("q2", answers={"text": [" "], "answer_start": [3]})),
        ("answer_start of 'London' is no whole", question("q2", answers={"text": ["London"], "answer_start": [None]})),
        ("line 3: 'question' is empty", question("q2", question="  ")),
        ("line 3: 'context' is empty", question("q2", context="")),
        ("2 rows have the id 'q1'", question("q1")),
    ],
)
def test_a_faulty_question_is_named(tmp_path, match, row):
    splits(tmp_path, [question(), row])
    fails(match, get("squad_v2"), tmp_path)


def test_the_same_question_in_two_files(tmp_path):
    for name in ("train-a.jsonl", "train-b.jsonl", "validation.jsonl"):
        write(tmp_path / name, [question()])
    fails("2 rows have the id 'q1'", get("squad_v2"), tmp_path, train=["train-a.jsonl", "train-b.jsonl"])


def test_rows_without_names_of_their_own_go_by_their_numbers(tmp_path):
    unnamed = {key: value for key, value in question().items() if key != "id"}
    files = [tmp_path / "a" / "train.jsonl", tmp_path / "b" / "train.jsonl"]
    for path in files:
        write(path, [unnamed])
    write(tmp_path / "validation.jsonl", [question(None), question("q2")])
    data = read_task(get("squad_v2"), str(tmp_path), train=[str(path) for path in files])
    assert data.train.ids == ["0", "1"]
    assert data.validation["validation"].ids == ["0", "1"]
    told = "not every row has an id of its own, so rows go by their numbers from 0"
    assert f"validation: {told}" in data.notes
    assert f"train: {told}" not in data.notes  # there is no such column


def test_a_dataset_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    splits(tmp_path / "data", ROWS, ".parquet", names=["negative", "positive"])
    data = read_task(get("sst2"), f"hub:{tmp_path / 'data'}")
    assert data.train.labels.tolist() == [1, 0, 0]
    assert data.train.texts[0][0] == "a fine film"
    swapped = read_task(get("sst2"), f"hub:{tmp_path / 'data'}", train=["validation"], validation=["train"])
    assert any(note.startswith("train: validation of hub:") for note in swapped.notes)
    fails(
        "no column 'premise', only sentence, label, idx",
        get("mnli"),
        f"hub:{tmp_path / 'data'}",
    )
    fails("validation is given twice", get("sst2"), f"hub:{tmp_path / 'data'}", train=["validation"])
    fails("split other, cannot be read", get("sst2"), f"hub:{tmp_path / 'data'}", train=["other"])
    fails("not a task of the hub", custom("classification", ["a"], "y"), "hub")
    fails("names no dataset", get("sst2"), "hub:")
