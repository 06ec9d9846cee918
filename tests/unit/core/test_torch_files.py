"""Archives of torch.save: whole ones pass, every other file is called what it is before anything is unpickled."""

from __future__ import annotations

import io
import os
import pickle
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from models.quantize import checkpoint
from utils.core.errors import CheckpointError
from utils.core.torch_files import check_archive

CONTENT = {"weights": torch.arange(1000.0), "bias": torch.ones(3, dtype=torch.float16), "text": "x" * 300}


class Foreign:
    """A pickle of it calls a function that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(CONTENT, buffer)
    return buffer.getvalue()


def members(content: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(member, archive.read(member)) for member in archive.infolist()]


def zipped(entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return buffer.getvalue()


def refused(path: Path, *texts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_archive(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for text in texts:
        assert text in message
    return message


@pytest.mark.parametrize("content", [CONTENT, {}, {"empty": torch.empty(0)}, [torch.ones(2, 2, dtype=torch.int64)]])
def test_what_torch_saves_passes(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    check_archive(tmp_path / "a.pt")


def test_a_file_of_any_name_and_folder_inside_passes(tmp_path):
    for name in ("größe.pt", "a b.pt", "ü" * 40 + ".pt"):
        torch.save(CONTENT, tmp_path / name)
        check_archive(tmp_path / name)


def test_what_is_no_archive_is_called_what_it_is(tmp_path, whole):
    mark = tmp_path / "ran"
    torch.save(CONTENT, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(Foreign(mark), tmp_path / "foreign.pt", _use_new_zipfile_serialization=False)
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    (tmp_path / "folder.pt").mkdir()
    files = {"plain": pickle.dumps({"a": 1}), "empty": b"", "text": b"these are no weights", "zeros": bytes(5000)}
    files |= {f"foreign{protocol}": pickle.dumps(Foreign(mark), protocol) for protocol in range(6)}
    for name, content in files.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    expected = {
        "legacy": "legacy format of PyTorch before 1.6", "foreign": "legacy format of PyTorch before 1.6",
        "tar": "is a tar archive", "folder": "is a folder", "missing": "does not exist",
        "plain": "is a plain pickle, not a PyTorch checkpoint", "empty": "it is empty", "zeros": "no zip archive",
        "text": "is not a PyTorch checkpoint, or it is truncated",
        **{f"foreign{protocol}": "is a plain pickle that names posix.mkdir" for protocol in range(6)},
    }  # fmt: skip
    for name, text in expected.items():
        message = refused(tmp_path / f"{name}.pt", text)
        assert ("truncated" in message) == (name in ("empty", "zeros", "text")), message
        with pytest.raises(CheckpointError, match=text.split(",")[0]):
            checkpoint.kind(tmp_path / f"{name}.pt")
    assert not mark.exists()


@pytest.mark.parametrize("keep", [1, 3, 30, 1000, -1, -30, -200])
def test_a_truncated_archive(tmp_path, whole, keep):
    (tmp_path / "part.pt").write_bytes(whole[:keep])
    refused(tmp_path / "part.pt", "truncated")


def test_every_flipped_bit_of_a_member_is_found(tmp_path, whole):
    """torch itself reads a weight with a flipped bit without a word."""
    path = tmp_path / "flipped.pt"
    weights = next(data for member, data in members(whole) if member.filename.endswith("data/0"))
    first = whole.index(weights)
    rng = random.Random(0)
    for _ in range(100):
        content, place = bytearray(whole), first + rng.randrange(len(weights))
        content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        assert not torch.equal(torch.load(path, weights_only=True)["weights"], CONTENT["weights"])
        refused(path, "damaged", "data/0 does not have its checksum")


def test_a_flipped_bit_anywhere_passes_only_where_nothing_reads_it(tmp_path, whole):
    """Padding and dates are free; what torch then reads is what was saved."""
    path = tmp_path / "flipped.pt"
    rng = random.Random(1)
    found = 0
    for _ in range(1500):
        content = bytearray(whole)
        content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            check_archive(path)
        except CheckpointError:
            found += 1
            continue
        try:
            loaded = torch.load(path, weights_only=True)
        except RuntimeError:  # fields that only torch's reader looks at; its callers say that the file is damaged
            continue
        assert loaded["text"] == CONTENT["text"]
        assert torch.equal(loaded["weights"], CONTENT["weights"])
        assert torch.equal(loaded["bias"], CONTENT["bias"])
    assert found > 1000


def test_archives_that_torch_did_not_write(tmp_path, whole):
    plain = [(member.filename, data) for member, data in members(whole)]
    archive = zipped(plain)
    encrypted = bytearray(archive)
    directory = archive.index(b"PK\x01\x02")
    encrypted[directory + 8] |= 1  # the flag in the directory
    huge = bytearray(archive)
    huge[directory + 20 : directory + 28] = b"\xfe\xff\xff\x7f" * 2  # both sizes
    second = archive.index(b"PK\x01\x02", directory + 4)
    shared = bytearray(archive)
    shared[second + 42 : second + 46] = archive[directory + 42 : directory + 46]  # the first member's place
    with_comment = io.BytesIO(archive)
    with zipfile.ZipFile(with_comment, "a") as opened:
        opened.comment = b"hello"
    bomb = [*plain, ("archive/data/9", bytes(10_000_000))]
    cases: dict[str, tuple[bytes, str]] = {
        "deflated": (zipped(bomb, zipfile.ZIP_DEFLATED), "is compressed, which torch.save never writes"),
        "encrypted": (bytes(encrypted), "is encrypted"),
        "huge": (bytes(huge), "overlaps its neighbours"),
        "shared": (bytes(shared), "is not where the directory says"),
        "prefixed": (b"PK" + bytes(100) + archive, "directory at its end is missing or damaged"),
        "comment": (with_comment.getvalue(), "directory at its end is missing or damaged"),
        "folders": (zipped([*plain, ("other/data/0", b"x")]), "torch.save did not write"),
        "capitals": (zipped([*plain, (plain[0][0].upper(), b"x")]), "torch.save did not write"),
        "twice": (zipped([*plain, ("archive/DATA.pkl", b"x")]), "holds archive/DATA.pkl twice"),
        "other": (zipped([("readme.txt", b"x")]), "zip file without data.pkl"),
        "script": (zipped([*plain, ("archive/constants.pkl", b"x")]), "TorchScript"),
    }
    for name, (content, text) in cases.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
        refused(tmp_path / f"{name}.pt", text)
    (tmp_path / "fine.pt").write_bytes(archive)
    check_archive(tmp_path / "fine.pt")


def test_members_that_overlap(tmp_path, whole):
    """Each has a header, a name and a checksum of its own, and its bytes hold the next one's."""
    inner = zipped([("archive/data/1", b"inner")])
    outer = bytearray(zipped([("archive/data.pkl", b"x"), ("archive/data/0", inner), ("archive/data/1", b"inner")]))
    entry = outer.rindex(b"PK\x01\x02")
    outer[entry + 42 : entry + 46] = outer.index(b"archive/data/1").__sub__(30).to_bytes(4, "little")
    (tmp_path / "overlap.pt").write_bytes(outer)
    refused(tmp_path / "overlap.pt", "overlaps its neighbours")


def test_an_archive_without_checksums_is_said_to_be_one(tmp_path, whole):
    if not hasattr(torch.serialization, "set_crc32_options"):
        content = whole
        for member, _ in members(whole):
            content = content.replace(member.CRC.to_bytes(4, "little"), bytes(4))
        (tmp_path / "a.pt").write_bytes(content)
    else:
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(CONTENT, tmp_path / "a.pt")
        finally:
            torch.serialization.set_crc32_options(True)
    refused(tmp_path / "a.pt", "saved without checksums")


def test_a_file_that_may_not_be_read(tmp_path, whole, monkeypatch):
    path = tmp_path / "a.pt"
    path.write_bytes(whole)

    def denied(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    refused(path, "cannot be read: Permission denied")


def test_the_expectation_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; a run's state was expected"):
        check_archive(tmp_path / "none.pt", "a run's state was expected")
