"""Messages, and what still works, if packages are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(program: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd, env=env)
    return ran.stdout.strip()


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark.sql.datasource"])
def test_without_a_package(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None\n"
    printed = run(f"{hide}try: import datastreamer.spark\nexcept ImportError as e: print(e)")
    assert printed == (
        "Spark needs packages that are missing or too old: install it with "
        "pip install 'datastreamer[spark]'"
    )
    # Where Spark looks for formats, it finds none of ours, and no error.
    assert (
        run(f"{hide}import pyspark_datastream as m; print(hasattr(m, 'DefaultSource'))") == "False"
    )


def test_a_zip_without_compiled_modules(tmp_path: Path) -> None:
    """What --py-files can ship."""
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as packed:
        for path in (ROOT / "datastreamer").rglob("*.py"):
            packed.write(path, path.relative_to(ROOT))
    printed = run(
        # An editable install may have a hook that finds modules beside the zip file.
        "import sys; sys.meta_path = [it for it in sys.meta_path if 'itable' not in repr(it)]\n"
        "try: import datastreamer.spark\nexcept ImportError as e: print(e)",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "package.zip")},
    )
    assert printed.startswith(f"{tmp_path}/package.zip/datastreamer/spark/__init__.py lacks")
    assert printed.endswith(
        "which no zip file of --py-files can have, so each machine needs the package: install it "
        "with pip install 'datastreamer[spark]'"
    )


def test_an_editable_install_is_a_folder_that_spark_lists(tmp_path: Path) -> None:
    """Spark looks for formats by `pkgutil.iter_modules`, which sees no import hooks."""
    project = tmp_path / "project"
    (project / "datastreamer").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "pyspark_datastream.py"):
        shutil.copy(ROOT / name, project)
    for name in ("__init__.py", "_version.py"):
        (project / "datastreamer" / name).write_text('__version__ = "1"\n')
    run(
        f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})",
        cwd=project,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        (path,) = (name for name in built.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth")
        assert built.read(path).decode().strip() == str(project)


def test_where_spark_looks() -> None:
    printed = run("import pyspark_datastream as m; print(m.DefaultSource.name())")
    assert printed == "datastream"
