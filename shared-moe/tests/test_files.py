import errno

import pytest

from shared_moe.errors import BusyError, DiskFullError
from shared_moe.files import atomic_path, folder_lock


def test_atomic_path_replaces_only_on_success(tmp_path):
    target = tmp_path / "out" / "a.txt"
    with atomic_path(target) as p:
        p.write_text("first")
    with pytest.raises(RuntimeError), atomic_path(target) as p:
        p.write_text("second")
        raise RuntimeError
    assert target.read_text() == "first"
    assert [f.name for f in target.parent.iterdir()] == ["a.txt"]


def test_full_disk_is_named_and_keeps_the_earlier_file(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("first")
    with pytest.raises(DiskFullError, match=r"a\.txt: no space left"), atomic_path(target) as p:
        p.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == "first"


def test_folder_lock_refuses_a_second_writer(tmp_path):
    with folder_lock(tmp_path), pytest.raises(BusyError, match="another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass
