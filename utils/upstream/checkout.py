"""Importing upstream YOLOv9 from the checkout that this file was copied into, with what it needs on a current stack.

Its parser of model descriptions, which evaluates strings, gets nothing unchecked from then on, whoever calls it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.logging import log_level
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
    models.yolo.parse_model = _checked_parser(models.yolo.parse_model)
    models.yolo.model_info = _if_shown(models.yolo.model_info)
    logging.getLogger("yolov5").setLevel(logging.ERROR)  # its layer table, printed at every build


def _checked_parser(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Upstream's `parse_model`, which evaluates texts: it gets nothing unchecked, whoever calls it."""

    def parse_model(d: Any, ch: Any) -> Any:
        return parse(check_description(d), ch)

    return parse_model


def _if_shown(describe: Callable[..., None]) -> Callable[..., None]:
    """Upstream's summary of a network, which runs a copy of it to count operations: only where its log is shown."""

    @wraps(describe)
    def model_info(*args: Any, **kwargs: Any) -> None:
        if logging.getLogger("yolov5").isEnabledFor(logging.INFO):
            describe(*args, **kwargs)

    return model_info


def quiet() -> AbstractContextManager[None]:
    """Keep upstream's own log lines out of ours."""
    return log_level("yolov5", logging.ERROR)
