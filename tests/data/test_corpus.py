import subprocess
import sys

import pytest

from maelm_fast.data import corpus
from maelm_fast.data.corpus import clean_paragraphs, is_prose

PROSE = "This function returns the number of items that were found in the list."
REST = f"""\
Title of the page
=================

.. note:: {PROSE} See :func:`other <mod.other>` for the ``whole`` story, or
   *the* `manual <http://x.org>`_ of it.

{PROSE[:-1]}::

    def code(that, should, be, left, out):
        return "This is the text of the code, and it is not for us to read."

>>> print("This is the text of a doctest, and it is not for us to read.")

Parameters
----------
x : int, optional
    The value that is put in the list, if there is one to be put in it.
:param y: The place in the list at which the value is to be put in.

- The first item of a list that is long enough to be kept for itself.
- The second item of the list, which is kept apart from the first of them.

.. code-block:: python

    This is the text of the code, and it is not for us to read.
"""


def test_restructured_text_becomes_paragraphs():
    assert list(clean_paragraphs(REST)) == [
        f"{PROSE} See other for the whole story, or the manual of it.",
        PROSE[:-1] + ":",
        "The value that is put in the list, if there is one to be put in it.",
        "The place in the list at which the value is to be put in.",
        "The first item of a list that is long enough to be kept for itself.",
        "The second item of the list, which is kept apart from the first of them.",
    ]


def test_markdown_becomes_paragraphs():
    text = f"# Heading\n\n![image](x.png) {PROSE}\n\n```\n{PROSE}\n```\n\n| a | table |\n|---|---|\n| {PROSE} | x |\n\n"
    text += "Read the [manual of **it**](https://x.org/y), as it is the best of all that there are.\n"
    assert list(clean_paragraphs(text)) == [
        PROSE,
        "Read the manual of it, as it is the best of all that there are.",
    ]


def test_google_parameters_lose_name_and_type():
    text = "Args:\n    x (`int`, *optional*): The value that is put in the list, if there is one to be put in it.\n"
    assert list(clean_paragraphs(text)) == ["The value that is put in the list, if there is one to be put in it."]


@pytest.mark.parametrize(
    "line",
    [
        "Too short to be of use.",
        "no capital at the start of this line, although it is long enough to be one.",
        "No full stop at the end of this line, although it is long enough to be one",
        "See https://example.org/the/page for all of the things that are to be said about it.",
        "Keys alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron.",
        "The value is x_1 = f(y_2) + g(z_3) * h(w_4) and y_2 = k(v_5) - m(u_6) for all of n.",
    ],
)
def test_what_is_not_prose(line):
    assert not is_prose(line)


def make_installation(root):
    (root / "alpha" / "tests").mkdir(parents=True)
    (root / "maelm_fast").mkdir()
    (root / "alpha-1.0.dist-info").mkdir()
    docs = [f"The {word} is the one that was found at the end of the {word} road by all." for word in ("cat", "dog")]
    body = "\n\n".join([*docs, "It is said that the best of the stories are told when there is nothing else to do."])
    (root / "alpha" / "a.py").write_text(f'"""{body}\n"""\nraise SystemExit("never run")\n')
    (root / "alpha" / "copy.py").write_text(f'"""{body}\n"""\n')
    (root / "alpha" / "broken.py").write_text('"""' + body)
    for hidden in ("alpha/tests/test_a.py", "maelm_fast/a.py"):
        (root / hidden).write_text(f'"""Not to be seen: the text of the tests, and that of the package.\n\n{body}"""')
    licence = "The licence of the thing is given to all who want to have it, and to those who do not."
    (root / "alpha-1.0.dist-info" / "METADATA").write_text(f"Name: alpha\nSummary: It is the thing.\n\n{licence * 3}\n")
    return docs


def test_an_installation(tmp_path, monkeypatch):
    docs = make_installation(tmp_path)
    monkeypatch.setattr(corpus, "_roots", lambda: [tmp_path])
    documents = corpus.embedded_corpus.__wrapped__()
    lines = [line for document in documents for line in document]
    assert len(documents) == 2  # one of the copies, and the metadata
    assert sum(line in docs for line in lines) == 2
    assert not any("Not to be seen" in line or "Summary" in line for line in lines)
    identity = corpus.corpus_identity()
    (tmp_path / "alpha-1.0.dist-info").rename(tmp_path / "alpha-1.1.dist-info")
    assert corpus.corpus_identity() != identity


def test_no_package_dominates(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_roots", lambda: [tmp_path])
    (tmp_path / "alpha").mkdir()
    for letter in "abcdefgh":
        text = " ".join(
            f"The {letter * n} is one of the {letter * (n + 1)} that the {letter * (n + 2)} has." for n in range(2, 9)
        )
        (tmp_path / "alpha" / f"{letter}.py").write_text(f'"""{text}"""')
    assert len(corpus.embedded_corpus.__wrapped__()) == 8
    monkeypatch.setattr(corpus, "GROUP_CHARS", 600)
    documents = corpus.embedded_corpus.__wrapped__()
    lengths = [sum(map(len, document)) for document in documents]
    assert sum(lengths[:-1]) < 600 <= sum(lengths)


def test_hash_randomisation_and_location_do_not_matter(tmp_path):
    script = (
        "import sys, pathlib; from maelm_fast.data import corpus;"
        "corpus._roots = lambda: [pathlib.Path(sys.argv[1])]; print(corpus.embedded_corpus())"
    )
    outputs = set()
    for seed in ("1", "2"):
        root = tmp_path / f"at{seed}"
        root.mkdir()
        make_installation(root)
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", script, root], env=environment, capture_output=True, check=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_the_real_one_reads_the_standard_library(monkeypatch):
    """A part of it that is quick: the email package."""
    root = corpus._roots()[0]
    documents = corpus._group_documents(root, root / "email", corpus._Novelty())
    lines = [line for document in documents for line in document]
    assert 5_000 < sum(map(len, lines)) < corpus.GROUP_CHARS + 200_000
    assert len(lines) == len(set(lines))
    assert all(is_prose(line) for line in lines)
