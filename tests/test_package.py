"""The package as a whole: what it exports, what importing it costs, and that it can be built."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent


def test_every_public_name_can_be_had_and_is_listed():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert dir(penstock) == sorted(penstock.__all__)


def test_type_checkers_can_read_which_names_are_public():
    tree = ast.parse(Path(penstock.__file__).read_text())
    (listed,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    assert ast.literal_eval(listed) == penstock.__all__
    branch = next(node for node in tree.body if isinstance(node, ast.If)).body
    imported = {name.asname or name.name for node in branch for name in node.names}
    assert imported == set(penstock.__all__) - {"__version__"}
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)  # a `__getattr__` would hide typing errors


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(penstock, "no_such_name")


def test_importing_penstock_imports_nothing_heavy():
    code = "import penstock, sys; print([m for m in ('torch','ray','pyarrow','numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_opening_a_dataset_needs_neither_torch_nor_pyarrow(tmp_path):
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}) as writer:
        writer.write({"x": 1})
    code = f"import penstock, sys; penstock.open({str(tmp_path / 'data')!r})[0]\n"
    code += "print([m for m in ('torch', 'ray', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_other_project_with_this_import_name_is_noticed_whichever_was_installed_last(tmp_path):
    folder = tmp_path / "penstock"
    folder.mkdir()
    for name in ("__init__.py", "__main__.py", "_version.py"):
        shutil.copy(Path(penstock.__file__).parent / name, folder)
    (folder / "_dag.py").touch()  # as theirs
    words = "unrelated one called penstock.* pip uninstall penstock, .* --force-reinstall --no-deps penstock-data"
    run = [sys.executable, "-c", "import penstock; print(penstock.__version__)"]
    ours = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ours.stdout == f"{penstock.__version__}\n"
    assert re.search("RuntimeWarning: .*" + words, ours.stderr)
    (folder / "__init__.py").write_text('"""Theirs."""')
    run = [sys.executable, "-m", "penstock", "--version"]
    theirs = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert theirs.returncode == 1
    assert re.fullmatch(f"penstock: .*{words}.\n", theirs.stderr)


@pytest.mark.parametrize(
    ("absent", "code", "message"),
    [
        (
            "torch",
            "penstock.DataLoader",
            "penstock.DataLoader and penstock.stream need PyTorch: .*'penstock-data.torch.'",
        ),
        ("torch", "penstock.masks", "penstock.masks needs PyTorch: pip install 'penstock-data.torch.'"),
        ("s3fs", "penstock.prepare('s3://a/b.csv', 'never')", "s3:// needs its fsspec driver .*'penstock-data.s3.'"),
        ("ray", "penstock.prepare('README.md', 'never', engine='ray')", "needs Ray .*'penstock-data.ray.'"),
    ],
)
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(tmp_path, absent, code, message):
    (tmp_path / "README.md").write_text("x")
    code = f"import sys; sys.modules[{absent!r}] = None; import penstock; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert re.search(message, done.stderr), done.stderr


def test_every_extra_is_used_by_the_code():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = [
        re.split("[<>=\\[]", line)[0] for name, lines in extras.items() if name not in ("dev", "docs") for line in lines
    ]
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    imported = {"pillow": "PIL", "penstock-data": "penstock", "s3fs": "s3"}
    assert [name for name in packages if not re.search(rf"\b{imported.get(name, name)}\b", code)] == []


@pytest.mark.parametrize(
    "path", [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")], ids=lambda path: path.name
)
def test_scripts_import_names_that_exist(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    asked = [(node.module, name.name) for node in nodes for name in node.names if node.module.startswith("penstock")]
    missing = [(module, name) for module, name in asked if not hasattr(importlib.import_module(module), name)]
    assert missing == []


def test_the_wheel_fits_any_python_and_holds_the_package_its_types_and_the_licence(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "penstock/py.typed" in names
    assert "penstock/native/kernels.so" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert {f"penstock/report/resources/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)


def test_constraints_pin_everything_exactly_and_torch_to_one_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert any(line.startswith("torch==") for line in lines)


def test_the_extras_that_the_documentation_names_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"torch", "text", "images", "media", "ray", "s3", "service", "docs", "all", "dev"}


def test_what_names_the_version_names_the_same_one():
    assert f"\nversion: {penstock.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_release_takes_actions_by_digest_and_waits_for_an_owner():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    uses = re.findall(r"uses: (\S+)", workflow)
    assert uses == re.findall(r"uses: (\S+@[0-9a-f]{40}) # v", workflow)
    assert "environment:" in workflow
    assert not re.search("password|secrets", workflow.split("jobs:")[1])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(re.findall(r"pip install (\S+)", workflow)) <= set(pins)


def test_the_workflow_runs_the_commands_of_the_readme_on_every_python_that_is_supported():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.findall(r"- run: make (\w+)", workflow) == ["demo", "test", "docs"]
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert re.findall(r'"(3\.\d+)"', workflow) == supported
