"""What is packaged, under which names, and beside whom."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Builds and installations are bounded one by one.
STEP_TIMEOUT_S = 60


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; its output is part of the failure when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, target: str, out: Path) -> Path:
    """Build a wheel or sdist with the backend of pyproject.toml, without a network."""
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", out, cwd=source)
    (built,) = out.iterdir()
    return built


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments, cwd=cwd)


def python(code: str, cwd: Path, *path: Path) -> str:
    """Run code in a Python that finds ``path`` first, and neither the repository nor the current directory."""
    prelude = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    return run(sys.executable, "-I", "-c", prelude + code, cwd=cwd)


def sources() -> set[str]:
    """Every file of the package that git knows or would take, under its packaged name."""
    listed = _git("ls-files", "-co", "--exclude-standard", "--", "resilient_executor", "supervisor", "chaos")
    files = [name for name in listed if (ROOT / name).is_file()]
    return {name if name.startswith("resilient_executor/") else f"resilient_executor/{name}" for name in files}


def _git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # The checkout may belong to another user than the one who runs CI.
    return run("git", "-c", "safe.directory=*", *arguments, cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_and_takes_no_other_name(wheel: Path) -> None:
    packaged = contents(wheel)
    assert {name.split("/")[0] for name in packaged} == {"resilient_executor"}
    assert packaged == sources()
    assert {
        "resilient_executor/py.typed",
        "resilient_executor/supervisor/policy.py",
        "resilient_executor/chaos/__init__.py",
        "resilient_executor/reference/checkpoint/config.json",
        "resilient_executor/reference/checkpoint/model.safetensors",
    } <= packaged


def test_the_sdist_holds_the_same_package_and_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert sources() <= files
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= files
    assert contents(build(unpacked, "wheel", tmp_path / "again")) == contents(wheel)


def test_supervisord_works_beside_ours(wheel: Path, tmp_path: Path) -> None:
    """vLLM installs supervisord, whose import name is ``supervisor``: neither may hide or overwrite the other."""
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, "supervisor", wheel, cwd=tmp_path)
    for first, second in (("theirs", "ours"), ("ours", "theirs")):
        imports = {
            "theirs": "import supervisor.options, supervisor.supervisord as theirs",
            "ours": "import resilient_executor.supervisor.policy as ours, resilient_executor.chaos",
        }
        code = f"{imports[first]}\n{imports[second]}\nprint(theirs.__file__)\nprint(ours.__file__)"
        theirs, ours = python(code, tmp_path, site).split()
        assert Path(theirs) == site / "supervisor" / "supervisord.py"
        assert Path(ours) == site / "resilient_executor" / "supervisor" / "policy.py"
    version = python("import supervisor.supervisord as s; s.main(['--version'])", tmp_path, site)
    assert re.fullmatch(r"\d+(\.\d+)+\S*\s*", version)


def test_an_editable_installation_exposes_one_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--no-build-isolation", "--target", site, "--editable", ROOT, cwd=tmp_path)
    code = f"""
import importlib.util, site
site.addsitedir({str(site)!r})
import resilient_executor.supervisor.policy as ours
print(ours.__file__)
for name in ("supervisor", "chaos"):
    spec = importlib.util.find_spec(name)
    print(spec and spec.origin)
"""
    ours, *others = python(code, tmp_path).splitlines()
    assert Path(ours) == ROOT / "resilient_executor" / "supervisor" / "policy.py"
    assert not any(str(ROOT / folder) in other for folder in ("supervisor", "chaos") for other in others)


def test_the_links_are_relative_and_lead_to_the_folders() -> None:
    for name in ("supervisor", "chaos"):
        link = ROOT / "resilient_executor" / name
        if not link.is_symlink():
            pytest.skip("unpacked from an sdist, which holds real folders")
        assert str(link.readlink()) == f"../{name}"


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    # Put together here, so that this file does not find itself.
    place = re.compile(rb"(?<![\w.-])/(?:" + b"|".join([b"wo" + b"rk", b"ro" + b"ot", b"home/[a-z]+"]) + rb")/")
    found = []
    for name in _git("ls-files", "-co", "--exclude-standard"):
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or path.suffix == ".safetensors":
            continue
        found += [f"{name}:{i}" for i, line in enumerate(path.read_bytes().splitlines(), 1) if place.search(line)]
    assert found == []


def test_every_source_file_stays_small() -> None:
    suffixes = {".py", ".toml", ".sh"}
    names = [n for n in _git("ls-files", "-co", "--exclude-standard") if Path(n).suffix in suffixes]
    lengths = {n: len((ROOT / n).read_text().splitlines()) for n in names if (ROOT / n).is_file()}
    assert {name: length for name, length in lengths.items() if length >= 400} == {}
