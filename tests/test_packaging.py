"""pyproject.toml, constraints.txt, environment.yml, the Makefile and what is installed say the same."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import dobnb

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CLASSROOM = [Requirement(line) for line in EXTRAS["classroom"]]
"""Installed in an environment of its own, with pins of its own beside those of the book."""
REQUIREMENTS = [
    Requirement(line)
    for group in (PROJECT["dependencies"], *(lines for name, lines in EXTRAS.items() if name != "classroom"))
    for line in group
]


def pins(path: str) -> dict[str, Requirement]:
    lines = [line for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


PINS = pins("constraints.txt")
CLASSROOM_PINS = pins("assignments/constraints.txt")
IMPORTS = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Names of modules that differ from the names of their packages."""


def pinned(name: str) -> str:
    (specifier,) = (PINS | CLASSROOM_PINS)[canonicalize_name(name)].specifier
    assert specifier.operator == "=="
    return specifier.version


@pytest.mark.parametrize("requirement", REQUIREMENTS + CLASSROOM, ids=lambda requirement: requirement.name)
def test_every_dependency_is_bounded_and_pinned_within(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {"=="} or operators == {">=", "<"}
    assert requirement.specifier.contains(pinned(requirement.name))


def test_jupyter_book_is_held_below_2() -> None:
    (requirement,) = (found for found in REQUIREMENTS if found.name == "jupyter-book")
    assert not requirement.specifier.contains("2.0.0") and requirement.specifier.contains("1.0.4")


def closure() -> set[str]:
    """Canonical names of what the dependencies need, and what those need, on this machine."""
    needed: set[str] = set()
    waiting = [(requirement.name, requirement.extras) for requirement in REQUIREMENTS]
    while waiting:
        name, extras = waiting.pop()
        if canonicalize_name(name) not in needed:
            needed.add(canonicalize_name(name))
            for line in metadata.requires(name) or []:
                requirement = Requirement(line)
                marker = requirement.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                    waiting.append((requirement.name, requirement.extras))
    return needed


def test_all_that_is_needed_is_pinned_and_installed_so() -> None:
    ours = {name for name in closure() if not re.match(r"nvidia-|cuda-|triton$", name)}  # those torch pins itself
    assert len(ours) > 100
    assert ours - set(PINS) == set()
    installed = {name: metadata.version(name) for name in ours}
    assert {name: version for name, version in installed.items() if version != pinned(name)} == {}


def test_pins_leave_cuda_to_torch() -> None:
    assert not [name for name in PINS if re.match(r"nvidia-|cuda-|triton$", name)]


def imported(*files: Path) -> set[str]:
    """Top-level names of the packages that `files` import, but for the standard library and their own neighbours."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    ours = {file.stem for file in files} | {"assignments", "dobnb", "tests"}
    return {canonicalize_name(IMPORTS.get(name, name)) for name in names - ours - set(sys.stdlib_module_names)}


def test_every_import_is_declared() -> None:
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    # imported where they are asked for
    asked = {canonicalize_name(Requirement(line).name) for line in EXTRAS["dask"] + EXTRAS["datasets"]}
    book = core | {canonicalize_name(Requirement(line).name) for line in EXTRAS["book"]}
    package = {file.name: file for file in (ROOT / "dobnb").glob("*.py")}
    pipeline = [package.pop(name) for name in ("book.py", "pages.py", "pdf.py")]
    assert imported(*package.values()) - core - asked == set()
    assert imported(*pipeline) - book - {"nbclient"} == set()  # papermill's own engine, whose error is caught
    tests = imported(*(ROOT / "tests").glob("*.py"), ROOT / "conftest.py")
    assert tests - {canonicalize_name(requirement.name) for requirement in REQUIREMENTS} == set()


def test_classroom_imports_what_its_extra_declares() -> None:
    assert not set(PINS) & set(CLASSROOM_PINS)  # one place for each pin
    declared = {canonicalize_name(requirement.name) for requirement in CLASSROOM}
    assert imported(*(ROOT / "assignments").glob("*.py")) <= declared


def test_environment_yml_installs_what_the_makefile_installs() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    python = next(line for line in conda if line.startswith("python"))
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])
    (install,) = re.findall(r"-m pip install (?:--\S+ )*(.+?) \|\|", (ROOT / "Makefile").read_text())
    assert " ".join(pip["pip"]) == install.replace("'", "") == "-c constraints.txt -e .[book,test]"
    assert set(EXTRAS) == {"book", "classroom", "dask", "datasets", "test"}


def test_one_version_and_one_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dobnb.__version__ and citation["license"] == PROJECT["license"] == "MIT"
    assert f"## {dobnb.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


# The Makefile's set-up, with a Python that only pretends


def make(folder: Path, version: tuple[int, int], venv: str = "exit 1") -> subprocess.CompletedProcess[str]:
    """`make html` in `folder` with a Python of that version, whose `-m venv` runs the shell line `venv`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_text((ROOT / name).read_text())
    python = folder / "python"
    pretend = f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0)"
    python.write_text(
        "#!/bin/sh\n"
        f"case $1 in\n--version) echo Python {version[0]}.{version[1]}.0;;\n"
        f'-c) exec "{sys.executable}" -c "{pretend}; $2";;\n'
        f"-m) {venv};;\nesac\n"
    )
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    command = ["make", "html", f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13), (3, 14), (4, 0)])
def test_makefile_takes_the_pythons_that_the_package_takes(tmp_path: Path, version: tuple[int, int]) -> None:
    done = make(tmp_path, version)
    taken = SpecifierSet(PROJECT["requires-python"]).contains(str(Version(f"{version[0]}.{version[1]}")))
    assert done.returncode != 0
    assert ("the book needs Python 3.11 to 3.13" in done.stdout) != taken
    assert ("Installing into .venv/" in done.stdout) == taken


def test_makefile_without_python(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "html", "PYTHON=python0.1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "python0.1 is not installed; set PYTHON" in done.stdout


def test_makefile_takes_up_an_install_that_was_broken_off(tmp_path: Path) -> None:
    """pip fails the first time: no stamp. The second time it installs, and the third time it is not asked again."""
    pip = tmp_path / "venv-python"
    pip.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        f'case "$*" in *--version*) exit 0;; *install*) test -f {tmp_path}/network;; esac\n'
    )
    pip.chmod(0o755)
    venv = "mkdir -p .venv/bin && cp venv-python .venv/bin/python"
    failed = make(tmp_path, (3, 12), venv)
    assert failed.returncode != 0 and "the install failed" in failed.stdout
    assert not (tmp_path / ".venv" / ".installed").exists()
    (tmp_path / "network").touch()
    assert make(tmp_path, (3, 12), venv).returncode == 0
    assert (tmp_path / ".venv" / ".installed").exists()
    installs = [line for line in (tmp_path / "calls").read_text().splitlines() if "install" in line]
    assert len(installs) == 2 and all(line.endswith("-c constraints.txt -e .[book,test]") for line in installs)
    subprocess.run(["make", "html", f"PYTHON={tmp_path / 'python'}"], cwd=tmp_path, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line for line in calls if "install" in line] == installs and calls[-1] == "-m dobnb book html"


# What CI runs


def test_ci_names_the_data_beside_the_checkout_and_allows_no_skip(tmp_path: Path) -> None:
    programs, checkout, data = (tmp_path / name for name in ("bin", "checkout", "shared/data"))
    for folder in (programs, checkout / ".ci", data):
        folder.mkdir(parents=True)
    (checkout / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    for name, body in {
        "bwrap": "",
        "chromium": "",
        "make": 'echo "$1 $DOBNB_NO_SKIPS $DOBNB_TEST_DATA $PWD"; exit 7',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    given = {name: value for name, value in os.environ.items() if not name.startswith("DOBNB_")} | {"PATH": path}

    def run(environment: dict[str, str]) -> str:
        command = ["bash", str(checkout / ".ci" / "run")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 7, done.stderr  # as make ends, so does CI
        return done.stdout.strip()

    assert run(given) == f"test 1 {data} {checkout}"
    assert run(given | {"DOBNB_TEST_DATA": "elsewhere"}) == f"test 1 elsewhere {checkout}"
    data.rmdir()
    assert run(given) == f"test 1  {checkout}"


@pytest.mark.parametrize("variable", [{}, {"DOBNB_NO_SKIPS": "1"}])
def test_a_skip_is_a_failure_where_none_is_allowed(tmp_path: Path, variable: dict[str, str]) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_a.py").write_text(
        "import pytest\n\ndef test_passes(): pass\n\ndef test_skips(): pytest.skip('no browser')\n\n"
        "@pytest.mark.xfail\ndef test_fails(): assert False\n"
    )
    (tmp_path / "test_b.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    given = {name: value for name, value in os.environ.items() if name != "DOBNB_NO_SKIPS"}
    environment = given | variable | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-q", "-c", os.devnull, f"--rootdir={tmp_path}", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if variable:
        assert done.returncode == 1 and "1 failed, 1 passed, 1 xfailed, 1 error" in done.stdout, done.stdout
        assert "no test may be skipped here (DOBNB_NO_SKIPS is set). Skipped: no browser" in done.stdout
        assert "could not import 'no_such_module'" in done.stdout
    else:
        assert done.returncode == 0 and "1 passed, 2 skipped, 1 xfailed" in done.stdout, done.stdout
