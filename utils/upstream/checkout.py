"""Importing upstream YOLOv9 from the checkout that this file was copied into, with what it needs on a current stack.

Upstream was written for torch 1.x, NumPy 1.x and an old setuptools. `install()` supplies what these libraries removed.
`import_upstream()` replaces functions that would download something or unpickle a dataset's label caches, and checks
model descriptions before upstream's parser evaluates their strings. Upstream's files are not edited.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import DataError, InputError
from utils.upstream.deferred import deferred
from utils.upstream.description import check_description

if TYPE_CHECKING:
    import numpy as np
    import torch

CHECKOUT = Path(__file__).resolve().parents[2]
NO_CACHES = "label caches are switched off"  # upstream reports it as a folder that is not writeable


@lru_cache(maxsize=1)
def import_upstream() -> None:
    """Import upstream; `InputError` outside of a patched YOLOv9 checkout, or if a library of upstream's is missing."""
    if not (CHECKOUT / "models" / "yolo.py").is_file():
        raise InputError(
            f"{CHECKOUT} is not a patched YOLOv9 checkout; run ./patch_yolov9.sh CHECKOUT and start the program there"
        )
    if sys.path[0] != str(CHECKOUT):
        sys.path.insert(0, str(CHECKOUT))
    install()
    try:
        with deferred():
            import models.yolo
    except ModuleNotFoundError as error:
        raise InputError(
            f"upstream YOLOv9 needs {error.name}; run install_dependencies.sh, where this overlay was cloned"
        ) from error
    import utils.dataloaders as dataloaders
    import utils.general as general

    without_label_caches(dataloaders)
    logging.getLogger("yolov5").setLevel(logging.ERROR)  # its layer table, printed at every build
    general.check_font = _without_network(general.check_font)
    models.yolo.parse_model = _checked(models.yolo.parse_model)
    models.yolo.model_info = _if_logged(models.yolo.model_info)


def _without_network(check_font: Callable[..., Any]) -> Callable[..., Any]:
    """Let upstream go on without a font that it cannot download: fonts serve plot labels, and matplotlib has one."""

    def check(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(OSError):  # URLError is one
            return check_font(*args, **kwargs)

    return check


def _checked(parse_model: Callable[..., Any]) -> Callable[..., Any]:
    """Check a model description before upstream's parser evaluates its texts, whoever calls it."""

    def parse(d: Any, ch: Any) -> Any:  # upstream's names
        return parse_model(check_description(d), ch)

    return parse


def _if_logged(model_info: Callable[..., None]) -> Callable[..., None]:
    """Leave a summary out that nobody reads: upstream runs a copy of the network to count its operations."""

    def info(*args: Any, **kwargs: Any) -> None:
        if logging.getLogger("yolov5").isEnabledFor(logging.INFO):
            model_info(*args, **kwargs)

    return info


def install() -> None:
    """Supply removed functions and optional modules. Call before importing anything of upstream's."""
    import numpy as np
    from packaging.version import parse
    from PIL.ImageFont import FreeTypeFont

    os.environ.setdefault("YOLOv5_AUTOINSTALL", "false")  # upstream would run pip by itself
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("MPLBACKEND", "agg")
    if not hasattr(np, "trapz"):  # removed in NumPy 2.4; upstream's AP integrates with it
        np.trapz = np.trapezoid  # type: ignore[attr-defined]
    if not hasattr(FreeTypeFont, "getsize"):  # removed in Pillow 10
        FreeTypeFont.getsize = lambda font, text: font.getbbox(text)[2:]  # type: ignore[attr-defined]
    if "pkg_resources" not in sys.modules:  # gone in setuptools 82; before, importing it warns and takes a second
        package = types.ModuleType("pkg_resources")
        vars(package).update(parse_version=parse, parse_requirements=lambda _: (), require=lambda _: None)
        vars(package).update(DistributionNotFound=ImportError, VersionConflict=ImportError)
        sys.modules["pkg_resources"] = package
    if "IPython" not in sys.modules and importlib.util.find_spec("IPython") is None:
        # Upstream asks whether this is a notebook, and matplotlib reads the version of a module of this name.
        package = types.ModuleType("IPython")
        display = types.ModuleType("IPython.display")
        vars(display).update(display=lambda *a, **k: None, clear_output=lambda *a, **k: None)
        vars(package).update(get_ipython=lambda: None, display=display, version_info=(9, 0, 0, ""), __version__="9.0.0")
        sys.modules.update({"IPython": package, "IPython.display": display})


def without_label_caches(module: types.ModuleType) -> None:
    """Keep one of upstream's dataset modules from reading or writing `labels/*.cache`, which are pickles.

    Upstream takes a cache that cannot be loaded for a missing one.
    """
    numpy = module.np

    def load(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("allow_pickle") or len(args) > 2:
            raise ValueError("label caches are not read: they are pickles, and could hold code")
        return numpy.load(*args, **kwargs)

    def save(file: Any, array: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(array, numpy.ndarray):
            raise ValueError(NO_CACHES)
        numpy.save(file, array, *args, **kwargs)

    same = types.ModuleType("numpy")
    vars(same).update(load=load, save=save)
    vars(same)["__getattr__"] = partial(getattr, numpy)  # all else, also what numpy imports on demand, such as random
    module.np = same  # type: ignore[attr-defined]
    logging.getLogger("yolov5").addFilter(lambda record: NO_CACHES not in record.getMessage())


def load_safely_by_default(read: Callable[[Any], Any]) -> None:
    """Make `torch.load` without `weights_only`, as upstream calls it, read with `read`, which runs no code of a file.

    The default since torch 2.6 refuses upstream's checkpoints, and the one before runs their code.
    """
    import torch

    original = torch.load

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return read(f) if kwargs.get("weights_only") is None else original(f, *args, **kwargs)

    torch.load = load


def finish_plots() -> None:
    """Let upstream's plots be drawn to the end: it draws in daemon threads, which Python cuts off when it ends.

    Call it before `import_upstream`, whose modules decorate their plotting functions.
    """
    import utils

    def threaded(function: Callable[..., None]) -> Callable[..., threading.Thread]:  # upstream's name
        def start(*args: Any, **kwargs: Any) -> threading.Thread:
            thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=False)
            thread.start()
            return thread

        return start

    utils.threaded = threaded  # type: ignore[attr-defined]


def prefer_speed() -> None:
    """Let upstream train without deterministic algorithms and in channels-last; cuDNN measures its algorithms.

    Weights stay in planes: upstream's fusing needs them so.
    """
    import torch

    import models.yolo as yolo
    import utils.general as general

    init_seeds, forward = general.init_seeds, yolo.DetectionModel.forward

    def seeds_alone(seed: int = 0, deterministic: bool = False) -> None:
        init_seeds(seed)
        torch.backends.cudnn.benchmark = True

    def channels_last(self: torch.nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, x.contiguous(memory_format=torch.channels_last), *args, **kwargs)

    general.init_seeds = seeds_alone
    yolo.DetectionModel.forward = channels_last


def make_dataset(
    images: Mapping[str, tuple[np.ndarray, tuple[int, int], Sequence[np.ndarray]]],
    imgsz: int,
    batch_size: int,
    *,
    stride: int,
    single_cls: bool = False,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
) -> torch.utils.data.Dataset[Any]:
    """Make upstream's `LoadImagesAndLabels` of images with known labels: it reads no labels, label caches and arrays.

    An item is (image uint8 `[3, H, W]` RGB, labels float `[n, 6]` of 0, class, normalised xywh, path, shapes).
    `dataset.collate_fn` makes batches of them. `DataError` where augmentation needs labels, and there are none.

    Args:
        images: path → labels float32 `[n, 5]` of class, normalised xywh; (width, height); and the labels' polygons, or
            nothing where they are boxes. Mosaics draw from all of them.
    """
    import_upstream()
    from utils.dataloaders import LoadImagesAndLabels

    if augment and not any(len(labels) for labels, _, _ in images.values()):
        raise DataError(f"no image beside {next(iter(images))} has labels, and --hyp needs some; leave it out")

    class KnownImages(LoadImagesAndLabels):
        def cache_labels(self, *_: Any, **__: Any) -> dict[str, Any]:  # upstream's name; it reads all labels here
            cache: dict[str, Any] = {}
            for path, (rows, size, polygons) in images.items():
                cache[path] = [rows.copy(), size, [*polygons]]
            counts = (len(images), 0, 0, 0, len(images))  # labels found, missing, empty, corrupt; all
            return {**cache, "hash": "", "results": counts, "msgs": [], "version": 0}

    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "list.txt"  # upstream looks for images, too, and for a label cache beside the list
        listed.write_text("image.jpg\n")
        own = {"augment": augment, "hyp": dict(hyp) if hyp else None, "single_cls": single_cls, "stride": stride}
        dataset = KnownImages(str(listed), imgsz, batch_size, **own)
    # Upstream takes an array NAME.npy beside an image instead of it; below a file there is none.
    dataset.npy_files = [Path(file) / "array" for file in dataset.im_files]
    return dataset
