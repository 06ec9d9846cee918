"""Importing upstream YOLOv9 from the checkout that this file was copied into, with what it needs on a current stack.

Its parser of model descriptions, which evaluates strings, gets nothing unchecked from then on, whoever calls it.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.upstream import shims
from utils.upstream.description import check_description

CHECKOUT = Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def import_upstream() -> None:
    """Import upstream with what it needs on a current stack.

    Raises:
        InputError: this file does not lie in a patched YOLOv9 checkout, or a library of upstream's is missing.
    """
    if not (CHECKOUT / "models" / "yolo.py").is_file():
        raise InputError(
            f"{CHECKOUT} is not a patched YOLOv9 checkout; run ./patch_yolov9.sh CHECKOUT and start the program there"
        )
    if sys.path[0] != str(CHECKOUT):
        sys.path.insert(0, str(CHECKOUT))
    shims.install()
    try:
        import models.yolo
    except ModuleNotFoundError as error:
        raise InputError(
            f"upstream YOLOv9 needs {error.name}; run install_dependencies.sh, where this overlay was cloned"
        ) from error
    shims.after_import()
    parse, describe = models.yolo.parse_model, models.yolo.model_info
    log = logging.getLogger("yolov5")
    log.setLevel(logging.ERROR)  # its layer table, printed at every build

    def parse_model(d: Any, ch: Any) -> Any:  # upstream's names; it evaluates texts, whoever calls it
        return parse(check_description(d), ch)

    def model_info(*args: Any, **kwargs: Any) -> None:  # runs a copy of the network to count operations
        if log.isEnabledFor(logging.INFO):
            describe(*args, **kwargs)

    models.yolo.parse_model, models.yolo.model_info = parse_model, model_info
