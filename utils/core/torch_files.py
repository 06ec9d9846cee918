"""Is a file an intact archive of `torch.save`? Said before anything in it is unpickled.

torch reads a zip archive without looking at its checksums, so that a flipped bit in a weight passes; and what is no
such archive ends in one of many errors of its reader. Here every member is read once, in blocks, and compared with its
CRC, and every other file is called what it is.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from utils.core.errors import CheckpointError, no_file

BLOCK = 1 << 20  # bytes read at a time
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a member: signature, then the lengths of its name and extra field
END_START = b"PK\x05\x06"
END_RECORD = struct.Struct("<4s12xI2x")  # signature, offset of the directory; without a comment
END_RECORD_64, LOCATOR_SIZE = struct.Struct("<4s44xQ"), 20
ZIP_START, LOCAL_START = b"PK", b"PK\x03\x04"
LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number, as torch before 1.6 pickled it
PICKLE_STARTS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
MOST_OPCODES = 200_000  # of a plain pickle that are looked at, to say what it names
AGAIN = "copy or download it again"


def check_archive(path: str | Path, expected: str = "--weights takes a .pt file", remedy: str = AGAIN) -> None:
    """Check that `path` is a whole archive of `torch.save`, each member stored once and as its checksum says.

    Args:
        expected: what a file is expected for, said where there is none.
        remedy: what to do about a damaged one.

    Raises:
        CheckpointError: it is missing, empty, of a format of torch before 1.6, a plain pickle, another zip, truncated
            or damaged; or it holds what torch never writes: compressed, encrypted, overlapping or repeated members.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(no_file(path, expected))
    try:
        with path.open("rb") as stream:
            _check(path, stream, remedy)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; {expected}") from error


def _check(path: Path, stream: BinaryIO, remedy: str) -> None:
    start = stream.read(512)
    if not start:
        raise CheckpointError(f"{path} is not a PyTorch checkpoint, or it is truncated: it is empty; {remedy}")
    if not start.startswith(ZIP_START):
        raise CheckpointError(f"{path} {_description(stream, start)}")
    members = _members(path, stream, remedy)
    _check_members(path, stream, members, remedy)


def _members(path: Path, stream: BinaryIO, remedy: str) -> Sequence[zipfile.ZipInfo]:
    """The archive's members, all in one folder, which torch names after the file."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members, directory = archive.infolist(), archive.start_dir
        if directory != _directory_offset(stream):
            raise zipfile.BadZipFile(
                "a comment, or bytes before the archive"
            )  # torch's reader would take another directory
    except Exception as error:  # a damaged directory breaks zipfile's reader in many ways
        raise CheckpointError(
            f"{path} is not a PyTorch checkpoint, or it is truncated: the directory at its end is missing or damaged; "
            f"{remedy}"
        ) from error
    folders = {member.filename.partition("/")[0] for member in members}
    names = {member.filename.partition("/")[2] for member in members}
    if "data.pkl" not in names:
        raise CheckpointError(f"{path} is a zip file without data.pkl, not a PyTorch checkpoint")
    if "constants.pkl" in names:
        raise CheckpointError(
            f"{path} is a TorchScript archive, not a checkpoint; give the .pt file that it was made from"
        )
    if len(folders) > 1 or any("\0" in member.orig_filename for member in members):
        raise CheckpointError(f"{path} is a zip file that torch.save did not write, not a PyTorch checkpoint")
    seen: set[str] = set()
    for member in members:
        name = member.filename.casefold()  # torch's reader does not tell a from A
        if name in seen:
            raise CheckpointError(f"{path} holds {member.filename} twice, which torch.save never writes")
        seen.add(name)
    if not any(member.CRC for member in members if member.file_size):
        raise CheckpointError(
            f"{path} was saved without checksums (torch.serialization.set_crc32_options); save it again with them"
        )
    end = 0
    for member in sorted(members, key=lambda one: one.header_offset):
        _check_kind(path, member)
        start = _data_offset(path, stream, member, remedy)
        if member.header_offset < end or start + member.file_size > directory:
            raise CheckpointError(
                f"{path} is damaged: {member.filename} of {member.file_size} bytes overlaps its neighbours; {remedy}"
            )
        end = start + member.file_size
    return members


def _directory_offset(stream: BinaryIO) -> int:
    """Where the record at the file's end says that the archive's directory begins."""
    stream.seek(-END_RECORD.size, io.SEEK_END)
    signature, offset = END_RECORD.unpack(stream.read(END_RECORD.size))
    if signature == END_START and offset == 0xFFFFFFFF:  # a record with 64 bits and its locator lie before it
        stream.seek(-END_RECORD.size - LOCATOR_SIZE - END_RECORD_64.size, io.SEEK_END)
        signature, offset = END_RECORD_64.unpack(stream.read(END_RECORD_64.size))
    return int(offset)


def _check_kind(path: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an encrypted or compressed member: torch stores members as they are."""
    what = ""
    if member.flag_bits & 0x1:
        what = "encrypted"
    elif member.compress_type != zipfile.ZIP_STORED:
        what = "compressed"
    elif member.file_size != member.compress_size:
        what = "of two sizes"
    if what:
        raise CheckpointError(f"{path}: {member.filename} is {what}, which torch.save never writes; save it again")


def _data_offset(path: Path, stream: BinaryIO, member: zipfile.ZipInfo, remedy: str) -> int:
    """Where a member's bytes begin, after its own header, whose name must be the directory's."""
    stream.seek(member.header_offset)
    header = stream.read(LOCAL_HEADER.size)
    if len(header) == LOCAL_HEADER.size:
        signature, name, extra = LOCAL_HEADER.unpack(header)
        if signature == LOCAL_START and stream.read(name) == _bytes_of_name(member):
            return member.header_offset + LOCAL_HEADER.size + name + extra
    raise CheckpointError(f"{path} is damaged: {member.filename} is not where the directory says; {remedy}")


def _bytes_of_name(member: zipfile.ZipInfo) -> bytes:
    return member.orig_filename.encode("utf-8" if member.flag_bits & 0x800 else "cp437")


def _check_members(path: Path, stream: BinaryIO, members: Sequence[zipfile.ZipInfo], remedy: str) -> None:
    for member in members:
        stream.seek(_data_offset(path, stream, member, remedy))
        left, checksum = member.file_size, 0
        while left and (block := stream.read(min(left, BLOCK))):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
        if left or checksum != member.CRC:
            raise CheckpointError(f"{path} is damaged: {member.filename} does not have its checksum; {remedy}")


def _description(stream: BinaryIO, start: bytes) -> str:
    """What a file is that is no zip archive."""
    if start.startswith(LEGACY_START):
        return (
            "is in the legacy format of PyTorch before 1.6, which this program does not read; where the file is "
            "trusted, load it with PyTorch and save it again with torch.save"
        )
    if start[257:262] == b"ustar":
        return (
            "is a tar archive, as the first versions of PyTorch wrote them, which this program does not read; where "
            "the file is trusted, load it with PyTorch and save it again with torch.save"
        )
    stream.seek(0)
    pickled = start.startswith(PICKLE_STARTS)
    named, ended = _first_global(stream)
    if named:
        return f"is a plain pickle that names {named}, not a PyTorch checkpoint; it was not loaded"
    if pickled or ended:
        return "is a plain pickle, not a PyTorch checkpoint; it was not loaded"
    return "is not a PyTorch checkpoint, or it is truncated: it is no zip archive"


def _first_global(stream: BinaryIO) -> tuple[str, bool]:
    """The first name that a pickle would import, and whether its end was reached; nothing of it is executed."""
    texts: list[str] = []
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if opcode.name in ("GLOBAL", "INST"):
                return _clean(str(argument).replace(" ", ".")), False
            if opcode.name == "STACK_GLOBAL":
                return _clean(".".join(texts[-2:])), False
            if isinstance(argument, str):
                texts = [*texts[-1:], argument]
            if count == MOST_OPCODES:
                return "", False
    except Exception:  # noqa: BLE001 - text and damaged files end anywhere
        return "", False
    return "", True


def _clean(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:80])
