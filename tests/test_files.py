"""Files are whole or absent."""

import os

import pytest

from dobnb.files import write_text


def test_a_file_is_replaced_and_folders_are_made(tmp_path):
    for text in ("old", "new: \u03ba\n"):
        write_text(tmp_path / "a" / "b" / "file", text)
        assert (tmp_path / "a" / "b" / "file").read_text(encoding="utf-8") == text
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_text(target, "old")

    def full(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_text(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and target.read_text() == "old"
