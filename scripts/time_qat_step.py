#!/usr/bin/env python3
"""Time one step of QAT on the GPU, with its memory: fixed and learned ranges, torch's operators and the fused ones.

    python scripts/time_qat_step.py
    python scripts/time_qat_step.py models/detect/gelan-t.yaml --batch-size 64 --variants fixed silu channels-last

MODEL is a model's YAML (random weights: the speed is the same) or float weights. Images are random. A step is that of
`qat.py quantize`: the teacher's forward, the student's forward and backward, and Adam; on a GPU in FP16 with loss
scaling. Every variant starts from the same networks, and its first steps, which compile and allocate, do not count. Run
it in a patched checkout.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.cli import add_device, add_image_size, run_program
from utils.core.bounds import bounded
from utils.core.device import device_name, select_device
from utils.core.errors import InputError
from utils.core.input_files import check_file
from utils.core.text_tables import aligned, columns
from utils.jobs.dependencies import need

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class Variant(NamedTuple):
    """What a step is made of.

    Attributes:
        name: for the command line.
        about: for the table.
        quantized: with quantizers; without them it is the network in float, the least that a step can take.
        ranges: of the recipe's `finetune`.
        fused, silu: by the fused operators, also of SiLU and what rounds it.
        channels_last: memory format of networks and images.
        cudnn_benchmark: cuDNN tries its algorithms.
        graph: forward and backward are one CUDA graph, as in `qat.py quantize`.
    """

    name: str
    about: str
    quantized: bool = True
    ranges: str = "learned"
    fused: bool = True
    silu: bool = True
    channels_last: bool = False
    cudnn_benchmark: bool = False
    graph: bool = False


VARIANTS = (
    Variant("float", "no quantizers", quantized=False, ranges="fixed"),
    Variant("fixed-operators", "fixed ranges, torch's operators", ranges="fixed", fused=False),
    Variant("operators", "learned ranges, torch's operators", fused=False),
    Variant("fixed", "fixed ranges, fused with SiLU", ranges="fixed"),
    Variant("fused", "learned ranges, fused", silu=False),
    Variant("silu", "learned ranges, fused with SiLU"),
    Variant("channels-last", "learned ranges, fused with SiLU, channels last", channels_last=True),
    Variant("cudnn", "the same, cuDNN's benchmark on", channels_last=True, cudnn_benchmark=True),
    Variant("graph", "learned ranges, fused with SiLU, CUDA graph", graph=True),
    Variant("graph-last", "the same, channels last", graph=True, channels_last=True),
    Variant("graph-cudnn", "the same, cuDNN's benchmark on", graph=True, channels_last=True, cudnn_benchmark=True),
    Variant("graph-operators", "learned ranges, torch's operators, CUDA graph", graph=True, fused=False),
    Variant("graph-float", "no quantizers, CUDA graph", quantized=False, ranges="fixed", graph=True),
)  # fmt: skip
RATE = 1e-6  # of the weights: random networks shall not diverge


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "time_qat_step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("models/detect/gelan-c.yaml")
    parser.add_argument("model", nargs="?", type=Path, default=default, metavar="MODEL", help=f"default: {default}")
    add_image_size(parser)
    parser.add_argument("--batch-size", type=bounded("batch_size"), default=16, metavar="N", help="default: 16")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", default=names, choices=names, help="in this order (default: all)")
    parser.add_argument(
        "--iterations", type=bounded("iterations"), default=30, metavar="N", help="steps that count (default: 30)"
    )
    parser.add_argument(
        "--warm-up", type=bounded("iterations"), default=8, metavar="N", help="steps before them (default: 8)"
    )
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Time the variants and log the table."""
    check_file(args.model, "give a model's YAML such as models/detect/gelan-c.yaml, or a .pt")
    need("torch")
    import torch

    from models.quantize import fused_cuda
    from models.quantize.recipe import Recipe
    from utils.jobs.compare_placement.variants import load, quantized

    device = select_device(args.device)
    network = load(args.model)
    if args.imgsz % int(network.stride.max()):
        raise InputError(f"--imgsz {args.imgsz} is no multiple of {int(network.stride.max())}, the network's stride")
    student = quantized(network, Recipe(), "int8", device).cpu()  # of each variant a copy goes to the device
    images = torch.rand(args.batch_size, 3, args.imgsz, args.imgsz, generator=torch.Generator().manual_seed(0))
    chosen = [variant for name in args.variants for variant in VARIANTS if variant.name == name]
    if not fused_cuda.works_on(device):
        left_out = [variant for variant in chosen if variant.quantized and variant.fused]
        logger.info("no fused operators on this device: left out %s", ", ".join(variant.name for variant in left_out))
        chosen = [variant for variant in chosen if variant not in left_out]
    rows = []
    for variant in chosen:
        rows.append(measured(variant, network, student, images, device, args.warm_up, args.iterations))
        logger.info("%s: %s ms, %s GiB", variant.about, *rows[-1][2::2])
    about = f"{args.model.stem}, {args.imgsz} pixels, batch {args.batch_size}, {device_name(device)}"
    titles = ["variant", "step", "ms", "images/s", "peak GiB"]
    logger.info("\n%s, torch %s\n%s", about, torch.__version__, "\n".join(aligned(columns(titles, titles[:2]), rows)))
    return 0


def measured(
    variant: Variant, network: nn.Module, student: nn.Module, images: Tensor, device: torch.device, warm_up: int,
    count: int,
) -> list[str]:  # fmt: skip
    """The table's row of one variant."""
    import torch

    cuda = device.type == "cuda"
    _forget(device)
    try:
        with _settings(variant):
            times = sorted(step_times(variant, network, student, images, device, warm_up, count))
    except torch.cuda.OutOfMemoryError:
        return [variant.name, variant.about, "-", "-", "out of memory"]
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}" if cuda else "-"
    median = times[len(times) // 2]
    return [variant.name, variant.about, f"{median:.1f}", f"{1000 * len(images) / median:.1f}", peak]


def _forget(device: torch.device) -> None:
    """Free what the variant before has left."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _settings(variant: Variant) -> Iterator[None]:
    import torch

    from models.quantize import fused_cuda

    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, variant.cudnn_benchmark
    try:
        with fused_cuda.switched(quantize=variant.fused, silu=variant.silu):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def step_times(
    variant: Variant, network: nn.Module, quantized: nn.Module, images: Tensor, device: torch.device, warm_up: int,
    count: int,
) -> list[float]:  # fmt: skip
    """Milliseconds of each step that counts, of an epoch of QAT on copies of the networks.

    They are taken between two requests for images; on a GPU between events, so that nothing waits for it.

    Args:
        network: fused and in float, the teacher; also the student of a variant without quantizers.
        quantized: the student, calibrated.
        images: float `[B, 3, H, W]` in 0..1.
    """
    import copy

    import torch

    from models.quantize.finetune import Finetuner
    from models.quantize.recipe import Finetune
    from utils import upstream

    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    teacher = upstream.call_fused(copy.deepcopy(network))
    student = copy.deepcopy(quantized) if variant.quantized else upstream.call_fused(copy.deepcopy(network))
    for model in (teacher, student):
        model.to(device, memory_format=layout)
    images = images.to(device, memory_format=layout)
    settings = Finetune.model_validate({"ranges": variant.ranges})
    cuda, marks = device.type == "cuda", []

    def batches() -> Iterator[Tensor]:
        for _ in range(warm_up + count + 2):  # on a GPU a batch is asked for before the step of the one before it
            marks.append(_mark(device))
            yield images

    Finetuner(student, teacher, settings, device=device, graph=variant.graph).run_epoch(batches(), lambda _: RATE)
    if cuda:
        torch.cuda.synchronize(device)
        return [one.elapsed_time(other) for one, other in itertools.pairwise(marks)][-count:]
    return [1000 * (other - one) for one, other in itertools.pairwise(marks)][-count:]


def _mark(device: torch.device) -> Any:
    """Now: an event on a GPU's present stream, else seconds."""
    import time

    import torch

    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
