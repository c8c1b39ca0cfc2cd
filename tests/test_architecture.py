"""Who may import whom, and whether README's map and examples are true."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = ("harness", "impls", "suites", "dashboards")
FOR_IMPLEMENTATIONS = {
    "harness.workload",
    "harness.models",
    "harness.layout",
    "harness.mesh",
    "harness.topology",
    "harness.placement",
    "harness.traffic",
    "harness.implementation",
    "harness.evaluation",
    "harness.parameters",
    "harness.precision",
    "harness.optimizer",
    "harness.data",
    "harness.tensor_plan",
    "harness.partition",
    "harness.chain",
    "harness.block_times",
    "harness.stage_costs",
    "harness.tensors_in_use",
    "harness.overlaps",
    "harness.pipeline_marks",
    "harness.wire_bytes",
    "harness.own_process",
    "harness.token_counts",
}
FOR_SUITES = {"harness.case", "harness.layout", "harness.topology", "harness.workload"}
FOR_DASHBOARDS = {"harness.tracking", "harness.result", "harness.regression", "harness.choosing"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(text: str) -> set[str]:
    """Every module that Python source imports, `from package import module` as package.module where that is one."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            within = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (within / f"{alias.name}.py").is_file() or (within / alias.name).is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def below(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def violations(package: str, allowed: set[str]) -> Iterator[str]:
    """The imports between our own packages that are not in `allowed`; a package may import itself."""
    for path in sources(package):
        if MICRO in path.parents:
            continue
        for module in imports(path.read_text()):
            if below(module, set(PACKAGES)) and not below(module, {package, *allowed}):
                yield f"{path.relative_to(ROOT)} imports {module}"


# A micro-benchmark takes one mechanism of ours out of its implementation, and the harness' own ranks to time it.
MICRO = ROOT / "suites/micro"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("impls", FOR_IMPLEMENTATIONS), ("suites", FOR_SUITES), ("dashboards", FOR_DASHBOARDS), ("harness", set())],
)
def test_imports_point_one_way(package: str, allowed: set[str]) -> None:
    assert list(violations(package, allowed)) == []


def test_every_kind_of_import_is_seen() -> None:
    text = "import a.b\nfrom harness import cli, case\nfrom harness.case import Case\ndef f():\n    import c as d"
    assert imports(text) == {"a.b", "harness.cli", "harness.case", "c"}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("mlflow", "harness/tracking.py"),
        ("deepspeed", "impls/deepspeed/"),
        ("fairscale", "impls/fairscale/"),
    ],
)
def test_a_library_is_imported_in_its_own_place_only(library: str, home: str) -> None:
    importers = [
        str(path.relative_to(ROOT)) for package in PACKAGES for path in sources(package) if below_any(path, library)
    ]
    assert [path for path in importers if not path.startswith(home)] == []


def below_any(path: Path, library: str) -> bool:
    return any(below(module, {library}) for module in imports(path.read_text()))


def test_a_family_does_not_import_another() -> None:
    families = {path.name for path in (ROOT / "impls").iterdir() if (path / "__init__.py").is_file()}
    crossing = [
        f"{path.relative_to(ROOT)} imports {module}"
        for family in families
        for path in sources(f"impls/{family}")
        for module in imports(path.read_text())
        if below(module, {f"impls.{other}" for other in families - {family}})
    ]
    assert crossing == []


def kept_files() -> set[str]:
    """The files of the project; in a checkout those that git would keep, so that local leftovers do not count."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def mapped_files() -> set[str]:
    """The paths in README's file map: a heading line ends in `/`, and the indented lines below it name its files."""
    block = re.search(r"## The files\n.*?```text\n(.*?)```", README, re.DOTALL)
    assert block is not None, "README has no file map"
    found, directory = set(), ""
    for line in block[1].splitlines():
        if not line.strip():
            continue
        name = line.split()[0]
        if not line.startswith(" "):
            directory = name if name.endswith("/") else ""
        if not name.endswith("/"):
            found.add(f"{directory if line.startswith(' ') else ''}{name}")
    return found


def test_the_file_map_names_every_source_file_and_nothing_else() -> None:
    # Of the tests, which mirror the rest, those that stand at the top, and the examples.
    shown = re.compile(r"(?!tests/)|tests/(examples/|[^/]+$)")
    wanted = {name for name in kept_files() if shown.match(name) and not name.endswith("__init__.py")}
    # A package whose __init__ is more than a docstring is in the map, too.
    wanted |= {
        name
        for name in kept_files()
        if name.endswith("/__init__.py") and len(ast.parse((ROOT / name).read_text()).body) > 1
    }
    assert mapped_files() - wanted == set(), "in the map, but not there"
    assert wanted - mapped_files() == set(), "there, but not in the map"


def test_the_example_of_the_readme_is_the_one_that_is_tested() -> None:
    example = (ROOT / "tests/examples/my_workload.py").read_text()
    assert f"```python\n{example}```" in README


def test_texts_name_no_machine() -> None:
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run", "noxfile.py", "pyproject.toml"):
        assert not re.search(r"(^|[\s`\"'=])/(home|root|work|tmp|Users)/", (ROOT / name).read_text()), name
