"""Whether a folder of cached files can be trusted: nobody else can have put them there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.filesystem import check_trusted


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def give_away(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize("exposed", ["", "above", "above/kept"])
@pytest.mark.parametrize("expose", [open_to_all, give_away])
def test_a_place_is_refused_if_any_folder_on_the_way_is_not_this_users_alone(
    tmp_path: Path, expose: Callable[[Path], None], exposed: str
) -> None:
    module, kept = tmp_path / "package" / "module.py", tmp_path / "room" / "above" / "kept"
    module.parent.mkdir()
    module.touch()
    kept.mkdir(parents=True)
    check_trusted(kept, module)
    expose(tmp_path / "room" / exposed)
    with pytest.raises(PermissionError, match=str(tmp_path / "room" / exposed)):
        check_trusted(kept, module)


def test_a_sticky_folder_may_be_on_the_way_but_is_no_place(tmp_path: Path) -> None:
    module, kept = tmp_path / "module.py", tmp_path / "shared" / "kept"
    module.touch()
    kept.mkdir(parents=True)
    kept.parent.chmod(0o1777)
    check_trusted(kept, module)
    with pytest.raises(PermissionError, match="Others can write"):
        check_trusted(kept.parent, module)


def test_who_may_change_the_module_may_change_what_it_caches(tmp_path: Path) -> None:
    module, kept = tmp_path / "package" / "module.py", tmp_path / "package" / "__pycache__"
    kept.mkdir(parents=True)
    module.touch()
    kept.chmod(0o775)
    with pytest.raises(PermissionError, match="Others can write"):
        check_trusted(kept, module)
    kept.parent.chmod(0o775)  # as under umask 002
    check_trusted(kept, module)
