import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maelm_fast.data import readers
from maelm_fast.data.readers import expand_inputs, identify, read_documents
from maelm_fast.errors import UserError

TEXT = "First line.\r\n  Second line.  \n\n\n\nNext document, caf\u00e9.\n"
DOCUMENTS = [("First line.", "Second line."), ("Next document, caf\u00e9.",)]


def read(*inputs, **options):
    return list(read_documents(expand_inputs([str(item) for item in inputs]), **options))


def compress(name, content):
    if name.endswith(".xz"):
        return lzma.compress(content)
    if name.endswith(".gz"):
        return gzip.compress(content)
    return pa.compress(content, codec="zstd", asbytes=True) if name.endswith(".zst") else content


def write(path, content):
    path.write_bytes(compress(path.name, content.encode() if isinstance(content, str) else content))
    return path


def fails(match, *inputs, **options):
    with pytest.raises(UserError, match=match) as caught:
        read(*inputs, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
def test_text_and_jsonl_compressed_or_not(tmp_path, suffix):
    assert read(write(tmp_path / f"a.txt{suffix}", "\ufeff" + TEXT)) == DOCUMENTS
    rows = "".join(json.dumps({"body": "\n".join(document)}) + "\n\n" for document in DOCUMENTS)
    assert read(write(tmp_path / f"a.jsonl{suffix}", rows), text_field="body") == DOCUMENTS


def test_parquet_columns_of_any_string_type(tmp_path):
    texts = ["\n".join(document) for document in DOCUMENTS]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(texts).cast(kind)
        pq.write_table(pa.table({"text": column, "other": [1, 2]}), tmp_path / "a.parquet", compression="zstd")
        assert read(tmp_path / "a.parquet") == DOCUMENTS


def test_dataset_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.jsonl", '{"text": "First line.\\nSecond line."}\n{"text": ""}\n')
    assert read(f"hf:{data}") == DOCUMENTS[:1]
    fails("row 1 has no field 'body'", f"hf:{data}", text_field="body")
    fails("hf:.*nothing cannot be read", f"hf:{tmp_path}/nothing")


def test_globs_are_sorted_and_inputs_keep_their_order(tmp_path):
    for name in "cab":
        write(tmp_path / f"{name}.txt", f"Text {name}.")
    assert expand_inputs([str(tmp_path / "c.txt"), str(tmp_path / "[ab].txt")]) == tuple(
        str(tmp_path / name) for name in ("c.txt", "a.txt", "b.txt")
    )


def test_a_directory_is_its_files_of_known_kinds(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "a.md.gz", TEXT)
    write(tmp_path / "b.rst", "Third.")
    write(tmp_path / "picture.png", b"\x89PNG")
    assert read(tmp_path) == [("Third.",), *DOCUMENTS]


def test_rows_of_csv_and_json(tmp_path):
    rows = [{"text": "First line.\nSecond line."}, {"text": " "}, {"text": 'Next "document", caf\u00e9.'}]
    quoted = "".join('"{}"\n'.format(row["text"].replace('"', '""')) for row in rows)
    expected = [DOCUMENTS[0], ('Next "document", caf\u00e9.',)]
    assert read(write(tmp_path / "a.csv.xz", f"text\n{quoted}")) == expected
    assert read(write(tmp_path / "a.json", json.dumps(rows, indent=1))) == expected
    assert read(write(tmp_path / "lines.json", "".join(json.dumps(row) + "\n" for row in rows))) == expected
    fails("line 2 has no field 'body'", tmp_path / "a.csv.xz", text_field="body")
    fails("object 1 has no field 'body'", tmp_path / "a.json", text_field="body")
    fails("line 2 is damaged", write(tmp_path / "b.csv", 'text\n"open'))
    fails("is not JSON", write(tmp_path / "b.json", '[{"text": "open"'))
    fails("line 2 has 1 fields and the first line 2", write(tmp_path / "c.csv", "id,text\n1\n"))
    fails("'id' twice", write(tmp_path / "d.csv", "id,text,id\n1,x,2\n"))


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    assert read(write(tmp_path / "a[1].txt", TEXT)) == DOCUMENTS


def test_wrong_inputs(tmp_path):
    text = write(tmp_path / "a.txt", TEXT)
    fails("no input given")
    fails("does not exist", tmp_path / "b.txt")
    fails("no file matches", tmp_path / "*.jsonl")
    (tmp_path / "empty").mkdir()
    fails("no file of a known kind", tmp_path / "empty")
    fails("unknown kind of file", write(tmp_path / "a.docx", "x"))
    fails("unknown kind of file", write(tmp_path / "a.parquet.gz", "x"))
    fails("given twice", text, tmp_path / "*.txt")
    fails("given twice", text, f"{tmp_path}/./a.txt")
    fails("no text in", write(tmp_path / "empty.txt.xz", " \n\n"))


def test_bad_bytes_are_located(tmp_path):
    fails("line 2, byte 7 of the text: not UTF-8", write(tmp_path / "a.txt.gz", b"Good.\nB\xff\n"))


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_truncated_and_damaged_files(tmp_path, suffix):
    path = write(tmp_path / f"a.txt{suffix}", "".join(f"Line {i * i} of many.\n\n" for i in range(5000)))
    path.write_bytes(path.read_bytes()[:-2000])
    fails("cannot be read to its end", path)
    path.write_bytes(b"not compressed at all")
    fails("cannot be read to its end", path)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("{", "line 2 is not JSON"),
        ('{"body": "x"}', "line 2 has no field 'text'"),
        ("[1]", "line 2 has no field 'text'"),
        ('{"text": null}', "line 2: field 'text' is not a string"),
        ('{"text": "\\ud800"}', "line 2: field 'text' holds half a surrogate pair"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_bad_jsonl_rows(tmp_path, row, match):
    fails(match, write(tmp_path / "a.jsonl", '{"text": "x"}\n' + row + "\n"))


def test_bad_parquet(tmp_path):
    pq.write_table(pa.table({"text": ["a", None], "number": [1, 2]}), tmp_path / "a.parquet")
    fails("no column 'body': set --text-field to one of text, number", tmp_path / "a.parquet", text_field="body")
    fails("row 2: field 'text' is not a string", tmp_path / "a.parquet")
    fails("row 1: field 'number' is not a string", tmp_path / "a.parquet", text_field="number")
    fails("cannot be read as parquet", write(tmp_path / "b.parquet", "nonsense"))


def test_endless_lines_and_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(readers, "MAX_DOCUMENT_CHARS", 150)
    fails("line 2 is longer than", write(tmp_path / "a.txt", "x\n" + "y" * 200))
    fails("line 3: a document of more than", write(tmp_path / "b.txt", ("z" * 60 + "\n") * 5))


def test_identity_changes_with_the_file(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    before = identify(str(path))
    write(path, TEXT + "More.")
    assert identify(str(path)) != before
