"""GLUE's own files: their folders and columns as they are handed out, and the hub's rows out of them."""

import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import read_task
from maelm_fast.finetuning.tasks import get

_PARSES = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
MNLI = [[*_PARSES.split(), "sentence1", "sentence2", "label1", "gold_label"]]
MNLI += [[*"0 63735 63735n slate b1 b2 p1 p2".split(), "a premise", "a hypothesis", "entailment", "contradiction"]]
QQP = [
    "id qid1 qid2 question1 question2 is_duplicate".split(),
    ["133273", "213221", "213222", "is it?", "is it this?", "1"],
    ["154657", "283005", "283006", "it ends"],
]
MRPC = [["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["1", "7", "8", 'He said "no', '" So he did']]
STSB = ["index genre filename year old_index source1 source2 sentence1 sentence2 score".split()]
STSB += [["0", "main", "MSR", "2012", "0001", "none", "none", "a plane", "an aeroplane", "4.600"]]
COLA = [["gj04", "1", "", "we sailed"], ["gj04", "0", "*", "sailed we the"]]
PLAIN = [["sentence", "label"], ["fine ", "1"]]


def write(folder, split, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "folder", "rows", "texts", "labels"),
    [
        ("mnli", "MNLI", MNLI, (["a premise"], ["a hypothesis"]), [2]),
        ("qqp", "QQP", QQP, (["is it?"], ["is it this?"]), [1]),
        ("mrpc", "MRPC", MRPC, (['He said "no'], ['" So he did']), [1]),
        ("stsb", "STS-B", STSB, (["a plane"], ["an aeroplane"]), [pytest.approx(4.6)]),
        ("cola", "CoLA", COLA, (["we sailed", "sailed we the"],), [1, 0]),
        ("sst2", "SST-2", PLAIN, (["fine "],), [1]),
    ],
)
def test_a_task_is_read_as_it_is_handed_out(tmp_path, name, folder, rows, texts, labels):
    for split in ("train", "dev_matched", "dev_mismatched", "test") if name == "mnli" else ("train", "dev", "test"):
        write(tmp_path / folder, split, rows)
    data = read_task(get(name), str(tmp_path))
    assert list(data.validation) == list(get(name).validation)
    for split in data.splits.values():
        assert (split.texts, split.labels.tolist()) == (texts, labels)
    assert sum("1 lines end before their label" in note for note in data.notes) == (2 if name == "qqp" else 0)


def test_faults_keep_their_lines_and_other_names_are_refused(tmp_path):
    write(tmp_path / "CoLA", "train", [*COLA, ["gj04", "7", "", "x"]])
    write(tmp_path / "CoLA", "dev", COLA)
    with pytest.raises(UserError, match=r"train.tsv: line 3: unknown label '7'"):
        read_task(get("cola"), str(tmp_path))
    write(tmp_path / "MRPC", "train", [["quality", "one", "two"], ["1", "a", "b"]])
    write(tmp_path / "MRPC", "dev", MRPC)
    with pytest.raises(UserError, match=r"line 2 has no field 'sentence1', only quality, one, two \(rename"):
        read_task(get("mrpc"), str(tmp_path))
    write(tmp_path / "MRPC", "train", [*MRPC, ["1", "7", "8", "it ends"]])  # only QQP's are left out
    with pytest.raises(UserError, match=r"line 3 has 4 fields and the first line 5"):
        read_task(get("mrpc"), str(tmp_path))
    with pytest.raises(UserError, match="no folder rte and no file"):
        read_task(get("rte"), str(tmp_path))
