import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a project")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="llm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
