"""What 1.0 had and 2.0 has not: one table, so that an old command or file is told what to use.

This module imports nothing.
"""

from __future__ import annotations

# An option ('--flag', or '--flag value' where only that value went) or a file's key ('section.key') -> what to use.
REMOVED: dict[str, str] = {
    "--nvjpeg": "leave it out; OpenCV decodes images, in as many processes as --workers says",
    "--infStreams": "evaluate an engine for more images at a time; benchmark_trt.py has --infStreams still",
    "--input int8": "use --input uint8",
    "--input-format": "leave it out; take bytes by export_qat.py --input uint8",
}


def removed(name: str) -> str:
    """What to say of an option or a key that was removed; '' for any other name.

    >>> REMOVED["--old"] = "use --new"; removed("--old")
    'was removed in 2.0: use --new'
    """
    return f"was removed in 2.0: {REMOVED[name]}" if name in REMOVED else ""
