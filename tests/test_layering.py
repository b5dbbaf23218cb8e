"""Which part may import which. The arrows point one way, so that any part can be read without those above it."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maelm_fast"
LEAVES = {"errors", "config", "batch", "masking", "philox", "native", "stop", "work"}
BELOW = LEAVES | {"presets", "model", "data", "training", "ops", "export", "text", "encoders"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "batch": set(),
    "masking": {"config"},
    "philox": set(),
    "native": set(),
    "stop": set(),
    "work": {"config", "errors", "stop"},
    "presets": {"config", "errors"},
    "kernels": set(),
    "ops": LEAVES | {"kernels"},
    "model": LEAVES | {"ops"},
    "data": LEAVES | {"ops"},
    "reporting": {"errors", "config", "data"},
    "training": LEAVES | {"presets", "model", "data", "ops"},
    "text": LEAVES | {"data"},
    "encoders": LEAVES | {"presets", "model", "data", "training", "ops", "export", "text"},
    "analysis": BELOW | {"reporting"},
    "export": LEAVES | {"presets", "model", "data", "training", "ops"},
    "integrations": BELOW,
    "finetuning": BELOW | {"reporting", "analysis"},
    "paper": BELOW | {"reporting", "analysis", "finetuning"},
    "cli": BELOW | {"reporting", "analysis", "finetuning", "paper"},
}
STANDS_ALONE = (
    PACKAGE / "export" / "modeling_maelm.py"
)  # shipped with exported models, where maelm_fast is not installed


def sources() -> list[Path]:
    """The package's files; rglob alone does not follow the link to kernels/."""
    return sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")])


@functools.cache
def imported(path: Path) -> set[str]:
    """Absolute module names imported anywhere in a file, including inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path == STANDS_ALONE, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "maelm_fast" and len(pieces) > 1 and pieces[1] != "__version__" else None


def test_parts_import_only_what_lies_below_them() -> None:
    wrong = []
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()} == {*MAY_IMPORT, "__init__"}
    for path in sources():
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for module in imported(path):
            if (other := part_of(module)) and other != part and other not in MAY_IMPORT[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """A way along the arrows that ends where it began, or [] if there is none."""
    finished: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in finished:
            for other in sorted(arrows[name]):
                if found := search(other, [*way, name]):
                    return found
            finished.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := search(name, []))), [])


def files_imported(path: Path, files: set[str]) -> set[str]:
    """Of the package's files those that this one imports. `from package import module` means the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
            names |= {module if module in files else parent for module, parent in found}
    return names & files


def test_no_circle_of_imports_between_files() -> None:
    """Imports inside functions and for annotations count too."""
    files = {module_of(path): path for path in sources()}
    assert not circle_in({name: files_imported(path, set(files)) for name, path in files.items()})


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_package_imports_neither_tests_nor_benchmarks() -> None:
    for path in sources():
        assert not {m.split(".")[0] for m in imported(path)} & {"tests", "benchmarks"}, path


def test_config_and_presets_need_no_torch() -> None:
    for name in ("config.py", "presets.py", "errors.py"):
        assert not {m.split(".")[0] for m in imported(PACKAGE / name)} & {"torch", "numpy"}, name


def test_one_file_knows_torch_distributed() -> None:
    """But for its checkpoints, which are saved by it."""
    for path in sources():
        found = {m for m in imported(path) if m.startswith("torch.distributed")}
        if path == PACKAGE / "training" / "checkpoint.py":
            found = {m for m in found if not m.startswith("torch.distributed.checkpoint")}
        assert not found or path == PACKAGE / "training" / "parallel.py", (path, found)


def test_the_shipped_model_code_stands_alone() -> None:
    assert not any(m.startswith("maelm_fast") for m in imported(STANDS_ALONE))


def test_no_build_products_in_git() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        bad = [f for f in listing.stdout.splitlines() if f.endswith((".pyc", ".so", ".o", ".whl", ".egg"))]
        assert not bad


ONCE = {
    "Stopped": "stop.py",
    "StopSignals": "stop.py",
    "lock": "work.py",
    "Ledger": "work.py",
    "a file lock": "work.py",
    "load_encoder": "encoders.py",
    "skipped_in_a_row += ": "training/loop.py",
}
"""Ideas that once stood in several rooms, and their one place: classes and functions, and what else is looked for."""


def test_what_is_defined_once() -> None:
    places: dict[str, list[str]] = {name: [] for name in ONCE}
    for path in sources():
        place, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                found.add(f"{node.target.attr} += ")
        if imported(path) & {"fcntl", "filelock"}:
            found.add("a file lock")
        for name in found & ONCE.keys():
            places[name].append(place)
    assert places == {name: [place] for name, place in ONCE.items()}


def test_one_op_one_name_five_places() -> None:
    """Kernel or compiled source, public op, reference, test, benchmark."""
    from benchmarks.registry import ENTRIES

    names = sorted(path.stem for path in (PACKAGE / "ops").glob("*.py") if path.stem not in PLUMBING)
    for name in names:
        places = [
            (ROOT / "kernels" / f"{name}.py").exists() or (ROOT / "csrc" / "ops" / f"{name}.cpp").exists(),
            (PACKAGE / "ops" / "reference" / f"{name}.py").exists(),
            (ROOT / "tests" / "ops" / f"test_{name}.py").exists(),
            name in ENTRIES,
        ]
        assert all(places), (name, places)
    kernels = {path.stem for path in (ROOT / "kernels").glob("*.py")} - KERNEL_PLUMBING
    assert kernels <= set(names)


KERNEL_PLUMBING = {"common", "attention_backward", "attention_parts", "attention_tiles"}
PLUMBING = {"__init__", "attention_inputs", "dispatch", "layouts", "registration", "row_sums", "stacked"}


def test_kernels_are_imported_as_part_of_the_package_only() -> None:
    for path in [*sources(), *(ROOT / "benchmarks").glob("*.py")]:
        assert "kernels" not in {module.split(".")[0] for module in imported(path)}, path
