"""Writing torch files so that nothing is ever half written, and a full disk is called by its name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from utils.cli import atomic_path


def save_torch(content: Any, path: str | Path) -> None:
    """`torch.save` to `path`: a reader sees the old file or the whole new one.

    The bytes are made in memory first: torch's writer hides the system's error, such as a full disk, behind a
    RuntimeError about file positions.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())
