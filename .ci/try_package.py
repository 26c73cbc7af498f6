"""Install a built wheel or sdist into an empty environment and use it as a newcomer would: prepare, open, load, resume.

    python3.12 .ci/try_package.py dist/penstock_data-1.0.0rc1-py3-none-any.whl
    python3.11 .ci/try_package.py dist/penstock_data-1.0.0rc1-py3-none-any.whl oldest.txt

Takes the versions of constraints.txt, or of a file that is named. Runs with the Python that is being tried; needs
nothing but the standard library.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
USE = """
import json, pathlib, torch, penstock

pathlib.Path("raw.jsonl").write_text("".join(json.dumps({"x": n, "y": [n] * (n % 5)}) + "\\n" for n in range(100)))
penstock.prepare("raw.jsonl", "data")
plan = penstock.open("data").shuffle(seed=1).batch(10)
loader = penstock.DataLoader(plan, workers="process", num_workers=1)
seen = [batch["x"] for _, batch in zip(range(3), loader)]  # in this order: zip asks the first one first
state = loader.state_dict()
loader.close()
loader = penstock.DataLoader(plan)
loader.load_state_dict(state)
seen += [batch["x"] for batch in loader]
loader.close()
assert torch.cat(seen).sort().values.tolist() == list(range(100))
"""


def main(package: Path, constraints: Path = ROOT / "constraints.txt") -> None:
    """Install and use `package`; an exception says what failed."""
    with tempfile.TemporaryDirectory(prefix="penstock-package-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        wanted = f"penstock-data[torch] @ {package.resolve().as_uri()}"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", constraints, wanted], check=True)
        script = Path(folder, "use.py")  # a file: worker processes look for the main module
        script.write_text(f"if __name__ == '__main__':\n{''.join(f'    {line}' for line in USE.splitlines(True))}")
        subprocess.run([python, script], cwd=folder, check=True)
        subprocess.run([f"{folder}/bin/penstock", "verify", "data"], cwd=folder, check=True)
    print(f"{package.name} works with Python {sys.version.split()[0]} and {constraints.name}.", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
