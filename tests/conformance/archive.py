"""Transformers' common model tests, from the source archive of the installed version.

The wheel has no tests; the source archive on PyPI has the top level of them. It is taken from the cache
(`~/.cache/avgpath-tests`, or under XDG_CACHE_HOME), into which pip fetches it at first. The environment variable
AVGPATH_TRANSFORMERS_SOURCE may name the archive instead, or a folder in which it is unpacked.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from unittest import mock

import transformers
from filelock import FileLock

VERSION = transformers.__version__
PACKAGE = "transformers_tests"  # not "tests", which is this repository's
SUITE = {
    "modeling": "test_modeling_common",
    "configuration": "test_configuration_common",
    "training": "test_training_mixin",
    "memory": "test_memory_cleanup_mixin",
}


class Unreachable(Exception):
    """The source archive can be neither found nor fetched; the message says why."""


def find_source() -> Path:
    """The unpacked source of the installed Transformers: a folder with `tests/test_modeling_common.py`.

    Raises:
        Unreachable: with the reason.
    """
    given = os.environ.get("AVGPATH_TRANSFORMERS_SOURCE")
    if given and (Path(given) / "tests").is_dir():
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgpath-tests"
    source = cache / f"transformers-{VERSION}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{source.name}.lock"):  # one pytest-xdist worker fetches, the others wait for it
            if not source.is_dir():
                with tempfile.TemporaryDirectory(dir=cache) as folder:
                    archive = Path(given) if given else fetch_archive(Path(folder))
                    with tarfile.open(archive) as files:
                        files.extractall(folder, filter="data")
                    (Path(folder) / source.name).rename(source)  # last, so that a folder in place is a whole one
    except (OSError, tarfile.TarError) as error:
        first_line = str(error).partition("\n")[0]
        raise Unreachable(f"{type(error).__name__}: {first_line}") from error
    return source


def fetch_archive(folder: Path) -> Path:
    """Download the source archive into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--timeout=20", "--dest", str(folder)]
    archive_only = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", f"transformers=={VERSION}"]
    try:
        run = subprocess.run([*pip, *archive_only], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(str(error)) from error
    if run.returncode:
        raise Unreachable(f"pip download failed: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
    return folder / f"transformers-{VERSION}.tar.gz"


def load_suite(stand_ins: dict[str, dict[str, object]]) -> types.SimpleNamespace:
    """Import the suite.

    Args:
        stand_ins: contents, by module name, of the modules that the suite imports and the archive lacks.

    Returns:
        The modules `modeling`, `configuration`, `training` and `memory`.

    Raises:
        Unreachable: the archive can be neither found nor fetched.
    """
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(find_source() / "tests")]
    sys.modules[PACKAGE] = package
    for name, contents in stand_ins.items():
        module = types.ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(contents)
        sys.modules[module.__name__] = module
    # The suite would import Transformers from beside itself; the installed one is meant.
    with mock.patch("transformers.utils.direct_transformers_import", lambda path: transformers):
        modules = {name: importlib.import_module(f"{PACKAGE}.{file}") for name, file in SUITE.items()}
    return types.SimpleNamespace(**modules)
