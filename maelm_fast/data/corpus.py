"""The embedded corpus: English that every Python installation holds, so that a demo needs neither files nor a network.

It is made of the docstrings, long string constants, package descriptions, documentation and licence texts of the
running interpreter's standard library and installed packages. Sources are parsed, never imported. The same interpreter
and package versions give the same corpus: files are visited in an order that depends only on their names below the
installation's directory, and nothing depends on time or on hash randomisation.
All rules of choice and cleaning here are ours. They aim at paragraphs that read like English, not at completeness.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import inspect
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

Document = tuple[str, ...]
"""Its lines, each stripped and not empty."""
CORPUS_VERSION = 1
OWN_PACKAGE = "maelm_fast"
GROUP_CHARS = 600_000
"""Text kept of one package at most, so that no large one dominates."""
GROUP_SOURCE_BYTES = 10_000_000
"""Files read of one package at most: bounds the time."""
MAX_FILE_BYTES = 2_000_000
MAX_BYTES_PER_THE = 430
"""Files with fewer "the" than one in so many bytes hold too little English to be worth parsing."""
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "testing", "node_modules"}
TEXT_SUFFIXES = {".txt", ".md", ".rst"}
TEXT_NAMES = ("METADATA", "LICENSE", "LICENCE", "COPYING", "NOTICE", "README")
MIN_DOCUMENT_CHARS = 200
MIN_STRING_CHARS = 80
SHINGLE_WORDS = 8
MAX_SEEN_SHARE = 0.4


@functools.cache
def embedded_corpus() -> tuple[Document, ...]:
    """The corpus: one document per file, one line per paragraph. Takes 10 to 20 seconds, once in a process."""
    novelty = _Novelty()
    documents = []
    collecting = gc.isenabled()
    gc.disable()  # syntax trees hold no cycles, and looking for some doubles the time
    try:
        for root in _roots():
            for group in _groups(root):
                documents += _group_documents(root, group, novelty)
    finally:
        if collecting:
            gc.enable()
    return tuple(documents)


def corpus_identity() -> str:
    """Changes when the corpus may: a hash of the rules' version, the interpreter's and the installed packages'."""
    packages = {path.name for root in _roots() for path in root.glob("*.*-info") if not _is_own(path.name)}
    names = [str(CORPUS_VERSION), sys.version.split()[0], *sorted(packages)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


# Which files


def _roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))


def _groups(root: Path) -> list[Path]:
    """A root's top-level modules, packages and package descriptions, sorted."""
    entries = (path for path in root.iterdir() if path.is_dir() or path.suffix == ".py")
    return sorted((path for path in entries if path.name not in SKIPPED_FOLDERS and not _is_own(path.name)), key=_name)


def _is_own(name: str) -> bool:
    return OWN_PACKAGE in name.replace("-", "_")


def _name(path: Path) -> str:
    return path.name


def _files(root: Path, group: Path) -> list[Path]:
    """The group's readable files, in an order that mixes its parts: by a hash of the path below the root."""
    found = [group] if group.is_file() else _walk(group)
    return sorted(found, key=lambda path: hashlib.blake2b(path.relative_to(root).as_posix().encode()).digest())


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.is_symlink():
                yield from _walk(path)
        elif path.suffix == ".py" or path.suffix in TEXT_SUFFIXES or path.name.startswith(TEXT_NAMES):
            yield path


def _group_documents(root: Path, group: Path, novelty: _Novelty) -> list[Document]:
    documents: list[Document] = []
    chars = source_bytes = 0
    for path in _files(root, group):
        try:
            size = path.stat().st_size
            content = path.read_bytes() if size <= MAX_FILE_BYTES else b""
        except OSError:
            continue
        if content.count(b" the ") * MAX_BYTES_PER_THE < size:
            continue
        source_bytes += size
        texts = _python_texts(content) if path.suffix == ".py" else _plain_texts(path.name, content)
        document = tuple(line for text in texts for line in clean_paragraphs(text) if novelty.admits(line))
        if (length := sum(map(len, document))) >= MIN_DOCUMENT_CHARS:
            documents.append(document)
            chars += length
        if chars >= GROUP_CHARS or source_bytes >= GROUP_SOURCE_BYTES:
            break
    return documents


class _Novelty:
    """Refuses a paragraph most of whose word sequences occurred before: repeated licences, copied docstrings."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def admits(self, line: str) -> bool:
        words = re.findall(r"[a-z]+", line.lower())
        shingles = {
            zlib.crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode())
            for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
        }
        repeated = len(shingles & self._seen) > MAX_SEEN_SHARE * len(shingles)
        self._seen |= shingles
        return not repeated


# Text from files


def _python_texts(content: bytes) -> Iterator[str]:
    """Docstrings of the module, its classes and functions, and long strings in the module's other statements."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _definition_texts(module)


def _definition_texts(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definition_texts(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            yield from _string(child.value)
        elif isinstance(node, ast.Module) and isinstance(child, ast.Expr | ast.Assign | ast.AnnAssign):
            yield from (text for part in ast.walk(child) if isinstance(part, ast.Constant) for text in _string(part))


def _string(node: ast.Constant) -> Iterator[str]:
    if isinstance(node.value, str) and len(node.value) >= MIN_STRING_CHARS:
        yield inspect.cleandoc(node.value)


def _plain_texts(name: str, content: bytes) -> Iterator[str]:
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if name == "METADATA":  # an e-mail header, then the package's description
        text = text.partition("\n\n")[2]
    yield text


# Paragraphs from text

FENCED = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE_LINE = re.compile(r"^\s*(>>>|\.\.\. |\$ |\||\+[-=+]{3}|In \[|@|#include|%|def |class |import |from \w+ import)")
RULE = re.compile(r"^\s*([=\-~^\"'*#`+_:.])\1{2,}\s*$|^\s*=+( =+)+\s*$")
HEADING = re.compile(r"^\s*(#+ .*|[A-Z]\w*( \w+)?:)\s*$")
TEXT_DIRECTIVE = re.compile(
    r"^\s*(\.\. (note|warning|tip|important|caution|seealso)::|\[?!(NOTE|TIP|WARNING)\]?)\s*", re.I
)
LITERAL_DIRECTIVE = re.compile(r"^\s*\.\. (code|sourcecode|math|doctest|test|parsed|plot|ipython|toctree|[\w-]*table)")
OTHER_DIRECTIVE = re.compile(r"^\s*(\.\. |<|\[!\[)")
ITEM = re.compile(r"^\s*([-*+•]|\(?\d+[.)]|\(?[a-z]\))\s+")
FIELD = re.compile(r"^\s*[:@](param|type|arg|raises?|returns?|rtype|keyword|var|ivar)[^:]*:\s*")
GOOGLE_PARAMETER = re.compile(r"^\s*\*{0,2}`{0,2}[\w.]+`{0,2}(\s*\([^()]*(\([^()]*\)[^()]*)*\))?\s*(:|--)\s+(?=[A-Z])")
NUMPY_PARAMETER = re.compile(r"^\s*\*{0,2}[\w.]+(, \*{0,2}[\w.]+)*\s*:\s\S.*$|^\s*[\w.]+$")


def clean_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a text in plain, reStructuredText or Markdown form that read like English, a line each, without
    the markup. Headings, code, tables, doctests, field lists' names and types are left out."""
    literal_indent: int | None = None
    for block in re.split(r"\n\s*\n", FENCED.sub("\n\n", text)):
        lines = block.strip("\n").expandtabs().split("\n")
        indent = _indent(lines[0])
        if literal_indent is not None and indent > literal_indent:
            continue
        literal_indent = indent if block.rstrip().endswith("::") or LITERAL_DIRECTIVE.match(block) else None
        if any(CODE_LINE.match(line) for line in lines):
            continue
        for paragraph in _items(lines):
            if len(paragraph) >= MIN_CHARS and is_prose(plain := strip_markup(paragraph)):
                yield plain


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _items(lines: list[str]) -> Iterator[str]:
    """A block's paragraphs: list items, parameter descriptions and indented parts stand by themselves."""
    if OTHER_DIRECTIVE.match(lines[0]) and not TEXT_DIRECTIVE.match(lines[0]):
        return
    item: list[str] = []
    previous = 0
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        indented_next = _indent(following) > _indent(line)
        if RULE.match(line) or RULE.match(following) or HEADING.match(line) or _is_parameter(line, indented_next):
            yield " ".join(item)
            item = []
            continue
        opening = next((p for p in (TEXT_DIRECTIVE, ITEM, FIELD, GOOGLE_PARAMETER) if p.match(line)), None)
        if opening or _indent(line) < previous:
            yield " ".join(item)
            item = []
        item.append((opening.sub("", line, count=1) if opening else line).strip())
        previous = _indent(line)
    yield " ".join(item)


def _is_parameter(line: str, indented_next: bool) -> bool:
    return indented_next and NUMPY_PARAMETER.match(line) is not None


MARKUP = [
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # Markdown image
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),  # Markdown link
    (re.compile(r"\[(\\?\^?[\w ,-]{1,12}|#\w+)\]_?"), ""),  # citation
    (re.compile(r":[\w:+-]+:`~?([^`<]+?)\s*(<[^`>]*>)?`"), r"\1"),  # role
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),  # reStructuredText link
    (re.compile(r"`+~?([^`]*?)`+_{0,2}"), r"\1"),  # literal
    (re.compile(r"\\?\*\\?\*?(\S[^*]*?)\\?\*\\?\*?(?!\w)"), r"\1"),  # emphasis
    (re.compile(r"(?<!\w)_{1,2}([^_]+)_{1,2}(?!\w)"), r"\1"),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),  # HTML
    (re.compile(r"\[([\w. ]+)\]"), r"\1"),
    (re.compile(r"\|(\w+)\|"), r"\1"),  # substitution
    (re.compile(r"::$"), ":"),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ([.,;:)])(?=\s|$)"), r"\1"),
]


TYPOGRAPHY = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})


def strip_markup(paragraph: str) -> str:
    for pattern, replacement in MARKUP:
        paragraph = pattern.sub(replacement, paragraph)
    return paragraph.translate(TYPOGRAPHY).strip()


MIN_CHARS, MIN_WORDS = 50, 9
MIN_LETTERS = 0.9  # spaces count as letters
MIN_COMMON_WORDS = 0.22
MAX_ODD_WORDS = 0.12
COMMON_WORDS = frozenset(
    (
        "a an and any are as at be been but by can for from has have if in into is it its may not of on one only or "
        "so such than that the their then there these they this to was we when which will with you your"
    ).split()
)
PLAIN_WORD = re.compile(r"^[\"'(]*([A-Za-z]+([-'/][A-Za-z]+)*|\d+([.,]\d+)*%?)[\"').,;:!?]*$")
OPENING = re.compile(r"^[\"'(]?[A-Z]")
CLOSING = re.compile(r"[.!?:][\"')]*$")
CODE = re.compile(r"[{}=\\<>|^~@#$_]{2,}|https?://|www\.|\w\(\)?\w*\.|[\w\]]\[|\ufffd")


def is_prose(line: str) -> bool:
    """Whether a paragraph reads like English: sentences of plain words, many of them common, hardly any code."""
    words = line.split()
    if len(line) < MIN_CHARS or len(words) < MIN_WORDS or not line.isascii():
        return False
    if not OPENING.match(line) or not CLOSING.search(line) or CODE.search(line):
        return False
    letters = sum(map(str.isalpha, line)) + len(words)
    common = sum(word.lower().strip("\"'(),.;:") in COMMON_WORDS for word in words)
    odd = sum(not PLAIN_WORD.match(word) for word in words)
    return (
        letters >= MIN_LETTERS * len(line)
        and common >= MIN_COMMON_WORDS * len(words)
        and odd <= MAX_ODD_WORDS * len(words)
    )
