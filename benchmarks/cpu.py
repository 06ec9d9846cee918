#!/usr/bin/env python3
"""INT8 on a CPU beside the peers, on the same weights in one run: AP, agreement and milliseconds of an image.

    python benchmarks/cpu.py --float FLOAT.onnx --int8 INT8.onnx --data data.yaml --output runs/cpu/digits.json
    python benchmarks/cpu.py ... --parts quantize --weight-bits 8      # elsewhere, before: carry runs/cpu/digits/ along
    python benchmarks/cpu.py ... --parts time evaluate --peers nncf-mixed onnxruntime

Both files come from one checkpoint by export_qat.py, without NMS. NNCF and ONNX Runtime quantize the FP32 file with
images of the training split; their files lie in the folder with the name of --output, and one that is there is not
made again. The JSON is written after each measurement, and what it holds is not measured again. Networks are timed in
turns, at batch size 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where benchmarks/ and utils/ lie

from benchmarks.peers import PEERS, Images, Peer, open_ir, peers
from utils import cli
from utils.core.errors import InputError
from utils.core.files import check_file, file_hash, read_json, read_onnx, save_torch, write_text
from utils.core.options import Count, ImageSize, Options, Workers, option
from utils.core.run_folder import held
from utils.core.score import Resampled, difference_error
from utils.core.weights import FLOAT_HASH
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import evaluate
from utils.evaluation.results import Reference
from utils.jobs.evaluate import without_tables
from utils.jobs.inputs import image_batches
from utils.jobs.open import need, open_openvino
from utils.onnx_graph.passes.for_openvino import drop_repeated_quantizers, offset_activations
from utils.reports.schema import hardware
from utils.runners import openvino
from utils.runners.base import Runner, as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt.timing import TimingConfig, time_interleaved

logger = logging.getLogger("__main__")  # whose lines are for the user, whatever starts this

WITH_OFFSETS = "ours, activations with zero points"
INSTRUCTIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
SOFTWARE = ("openvino", "nncf", "onnxruntime", "onnx", "torch", "numpy")
MADE_FROM = ("float", "data", "imgsz", "calib_images", "seed")  # the settings that a peer's file depends on
Part = Literal["quantize", "time", "evaluate"]


class CpuOptions(Options):
    """The comparison on a CPU."""

    float_file: str = option(..., "FP32 .onnx", "--float", metavar="FILE")
    int8_file: str = option(..., "INT8 .onnx of the same weights, weakly typed", "--int8", metavar="FILE")
    data: str = option(..., "dataset's YAML", metavar="FILE")
    output: str = option(..., "JSON of results; peers' files lie in the folder of its name", metavar="FILE")
    network: str = option("", "its name in tables (default: that of the FP32 file)", metavar="NAME")
    imgsz: ImageSize | None = option(None, "input size in pixels (default: the file's)", "--imgsz", metavar="PX")
    ir: list[str] = option(
        [],
        "further INT8 files of these weights, OpenVINO's .xml; FILE.json beside one says how it was made",
        metavar="FILE",
    )
    peers: list[str] = option(list(PEERS), f"of {', '.join(PEERS)}, or none", metavar="NAME")
    parts: list[Part] = option(["quantize", "time", "evaluate"], "what is done, in this order", metavar="PART")
    weight_bits: Literal[7, 8] | None = option(
        None, "of quantize_static (default: 7 on a processor that saturates)", type=int, metavar="7|8"
    )
    calib_images: Count = option(300, "that the peers quantize with", metavar="N")
    seed: int = option(57, "of the order of training images", metavar="N")
    limit: Count | None = option(None, "evaluate on so many images", metavar="N")
    workers: Workers = option(2, "processes that read images", metavar="N")
    threads: list[Count] = option([1, 2], "each is timed", metavar="N")
    seconds: float = option(3.0, "of timing each network", gt=0, metavar="S")
    rounds: Count = option(5, "how often each network gets its turn", metavar="N")


@dataclass(frozen=True)
class Contender:
    """A network as it is run.

    Attributes:
        file: whose file: FP32, ours, a peer's name.
        runtime: OpenVINO or ONNX Runtime.
        rest: the precision of layers that are not INT8.
        open: a runner with so many threads; None: one for each core.
    """

    file: str
    runtime: str
    rest: str
    open: Callable[[int | None], Runner]

    @property
    def name(self) -> str:
        """Unique text."""
        return f"{self.file}, {self.runtime}, {self.rest}"


class Study:
    """Files, dataset and results of one run of this program.

    Attributes:
        content: what --output holds.
    """

    def __init__(self, options: CpuOptions) -> None:
        """Read the files' metadata and the results that are there.

        Raises:
            InputError: a file cannot be used, the two files are not of the same weights, or --output holds results
                of other files, settings or another processor.
        """
        self.options, self.output = options, Path(options.output).resolve()
        self.float_file = check_file(options.float_file, "expected the float .onnx")
        self.int8_file = check_file(options.int8_file, "expected the INT8 .onnx")
        self.folder = self.output.with_suffix("")
        self.exact = openvino.multiplies_exactly("CPU")
        known = peers(options.weight_bits or (8 if self.exact else 7))
        self.peers = {name: known[name] for name in options.peers if name != "none"}
        self.data: DataConfig = load_data(options.data)
        with OnnxRuntimeRunner(self.float_file) as runner, OnnxRuntimeRunner(self.int8_file) as other:
            if runner.metadata.get(FLOAT_HASH) != other.metadata.get(FLOAT_HASH):
                raise InputError(f"{self.int8_file} was not made from the weights of {self.float_file}")
            for file, metadata, quantized in (
                (self.float_file, runner.metadata, False),
                (self.int8_file, other.metadata, True),
            ):
                if (metadata.get("kind", "float") != "float") != quantized:
                    expected = "an INT8" if quantized else "a float"
                    raise InputError(f"{file} is {metadata.get('kind', 'float')}; expected {expected} .onnx")
            self.plan = InputPlan.of(runner, options.imgsz, 1)
            self.stride, self.form, self.input = runner.stride, runner.input_spec, runner.inputs[0]
            recipe = json.loads(other.metadata.get("recipe", "{}"))
            ours = {"kind": other.metadata.get("kind", ""), "calibration": recipe.get("calibration")}
        files = {"float": file_hash(self.float_file), "int8": file_hash(self.int8_file), "data": self.data.file.name}
        numbers = {"imgsz": list(self.plan.imgsz), "limit": options.limit, "calib_images": options.calib_images}
        network = options.network or self.float_file.stem
        settings = {"network": network, **files, **numbers, "seed": options.seed}
        self.content: dict[str, Any] = {
            "what": "INT8 on a CPU: one network by this project, by NNCF and by ONNX Runtime; AP and agreement with "
            "FP32, and milliseconds of infer() at batch size 1 by number of threads, all networks in turns.",
            "settings": settings,
            "machine": machine(self.exact),
            "ours": ours,
            "rows": [],
        }
        self._take_over(self.output, ("settings", "machine"))

    def _take_over(self, file: Path, same: tuple[str, ...]) -> None:
        """Go on with the results in a file, if it is there."""
        if not file.is_file():
            return
        before = read_json(file, "expected results of this program")
        for part in same:
            changed = [key for key, value in self.content[part].items() if before.get(part, {}).get(key) != value]
            if changed:
                raise InputError(f"{file} holds results of another {', '.join(changed)}; choose another --output")
        self.content = before

    def save(self) -> None:
        """Write the results."""
        self.content["date"] = datetime.now(timezone.utc).date().isoformat()
        self.content["software"] = software()
        notes = {peer.name: self.note(peer) for peer in self.peers.values()}
        notes |= {Path(path).stem: Path(f"{path}.json") for path in self.options.ir}
        self.content["peers"] = {
            name: read_json(note, "expected how a file was made") for name, note in notes.items() if note.is_file()
        }
        write_text(self.output, json.dumps(self.content, indent=1) + "\n")

    def row(self, state: Contender) -> dict[str, Any]:
        """The row of a state, a new one if there is none."""
        rows: list[dict[str, Any]] = self.content["rows"]
        for row in rows:
            if row["state"] == state.name:
                return row
        rows.append(
            {"state": state.name, "file": state.file, "runtime": state.runtime, "rest": state.rest, "times": {}}
        )
        return rows[-1]

    # The peers' files

    def quantize(self) -> None:
        """Make the peers' files that are not there."""
        missing = {name: peer for name, peer in self.peers.items() if not (self.folder / peer.file).is_file()}
        if not missing:
            return
        images = Images(self.calibration_images(), self.float_file)
        for name, peer in missing.items():
            began = time.perf_counter()
            peer.quantize(images, self.folder / peer.file)
            seconds = time.perf_counter() - began
            note = {"by": peer.name, "settings": peer.settings, "images": len(images.images), "seconds": seconds}
            settings = {name: self.content["settings"][name] for name in MADE_FROM}
            note |= {"software": software(), "machine": hardware()["cpu"], "made_from": settings}
            write_text(self.note(peer), json.dumps(note, indent=1) + "\n")
            logger.info("%s: quantized in %.0f s", name, seconds)

    def note(self, peer: Peer) -> Path:
        """The file that says how a peer's file was made."""
        return self.folder / f"{peer.file}.json"

    def calibration_images(self) -> list[torch.Tensor]:
        """Training images as ours are calibrated with: letterboxed, in the order of the seed; uint8 `[1, 3, H, W]`."""
        options = self.options
        loader = make_loader(
            self.data,
            "train",
            imgsz=self.plan.imgsz,
            batch_size=1,
            stride=self.stride,
            workers=options.workers,
            shuffle=True,
            first=options.calib_images,
            seed=options.seed,
        )
        return list(image_batches(loader))

    # Networks

    def states(self) -> Iterator[Contender]:
        """All networks to measure, FP32 in OpenVINO first; a peer's without its file is left out."""
        float_file, int8_file = self.float_file, self.int8_file
        model = drop_repeated_quantizers(offset_activations(read_onnx(int8_file)))
        for precision in openvino.precisions("CPU"):
            if precision == "fp16":
                continue
            rest = precision.upper()
            how = partial(Contender, runtime="OpenVINO", rest=rest)
            yield how("FP32", open=partial(open_file, float_file, precision))
            yield how("ours", open=partial(open_file, int8_file, precision))
            if self.exact:
                yield how(WITH_OFFSETS, open=partial(open_with_offsets, int8_file, model, precision))
            for name, file in self.other_files(".xml"):
                yield how(name, open=partial(open_ir, file, float_file, precision))
        for name, file in [("FP32", float_file), *self.other_files(".onnx")]:
            yield Contender(name, "ONNX Runtime", "FP32", partial(open_in_onnxruntime, file))

    def other_files(self, suffix: str) -> Iterator[tuple[str, Path]]:
        """Name and file of each peer, and of `--ir`, with such a name.

        Raises:
            InputError: a peer's file was made from other files or settings.
        """
        for peer in self.peers.values():
            file = self.folder / peer.file
            if file.suffix != suffix:
                continue
            if not file.is_file():
                logger.warning("%s is not there and is left out; --parts quantize makes it", file)
                continue
            made_from = read_json(self.note(peer), "expected how it was made").get("made_from", {})
            if changed := [key for key in MADE_FROM if made_from.get(key) != self.content["settings"][key]]:
                raise InputError(f"{file} was made with another {', '.join(changed)}; choose another --output")
            yield peer.name, file
        for path in self.options.ir:
            file = check_file(path, "expected OpenVINO's .xml")
            if file.suffix == suffix:
                yield file.stem, file

    # Measuring

    def time(self) -> None:
        """Time all networks in turns, for each number of threads for which one of them has no times."""
        states = list(self.states())
        loader = make_loader(
            self.data, "val", imgsz=self.plan.imgsz, batch_size=1, stride=self.stride, workers=0, limit=1
        )
        feed = {self.input.name: as_feed(next(image_batches(loader)), self.form, self.input.dtype)}
        options = self.options
        config = TimingConfig(duration=options.seconds, rounds=options.rounds)
        for threads in map(str, options.threads):
            if all(threads in self.row(state)["times"] for state in states):
                continue
            with ExitStack() as stack:
                runs: dict[str, Callable[[], object]] = {}
                for state in states:
                    runner = stack.enter_context(state.open(int(threads)))
                    runs[state.name] = partial(runner.infer, feed)
                figures = time_interleaved(runs, config)
            for state in states:
                self.row(state)["times"][threads] = figures[state.name].to_dict()["latency"]
            how = f"{options.seconds:g} s of each in {options.rounds} rounds"
            self.content.setdefault("timing", {})[threads] = how
            self.save()
            medians = [f"{name} {one.parts['latency'].median:.1f}" for name, one in figures.items()]
            logger.info("ms, threads %s: %s", threads, "; ".join(medians))

    def evaluate(self) -> None:
        """Evaluate each network that has no AP yet, FP32 first, whose detections are the reference."""
        options, kept = self.options, self.folder / "reference.pt"
        config = EvalConfig(imgsz=self.plan.imgsz, batch_size=1, workers=options.workers, limit=options.limit)
        reference: Reference | None = None
        for number, state in enumerate(self.states()):
            row = self.row(state)
            if number == 0 and "ap" in row and kept.is_file():
                reference = Reference(**torch.load(kept, weights_only=True))
            if "ap" in row and reference:
                continue
            began = time.perf_counter()
            with state.open(None) as runner, without_tables():
                result = evaluate(
                    runner,
                    self.data,
                    config,
                    progress=False,
                    name=state.name,
                    reference=reference,
                    as_reference=not reference,
                )
            if reference is None and result.reference:
                reference = result.reference
                save_torch(vars(reference) | {"detections": dict(reference.detections)}, kept)
            resampled = result.statistics.resampled() if result.statistics else None
            self.content["images"], self.content["objects"] = result.images, result.instances
            row |= {
                "ap": result.ap,
                "ap50": result.ap50,
                "ap_coco": result.ap_coco,
                "agreement": result.agreement,
                "ap_resampled": resampled.to_text() if resampled else "",
                "ran_on": result.measured_on,
                "not_finite": result.not_finite,
            }
            base = self.content["rows"][0] if number else row
            row |= {"to_float": row["ap"] - base["ap"], "error": error_to(row, base)}
            self.save()
            agreement = "" if result.agreement is None else f", agreement {result.agreement:.4f}"
            seconds = time.perf_counter() - began
            logger.info("%s: AP %.4f%s, %.0f s", state.name, result.ap, agreement, seconds)


def error_to(row: dict[str, Any], base: dict[str, Any]) -> float | None:
    """Standard error of the difference of AP of two rows; None where one is not known."""
    texts = [row["ap_resampled"], base["ap_resampled"]]
    resampled = [Resampled.from_text(text) for text in texts if text]
    return difference_error(*resampled) if len(resampled) == 2 else None


def open_file(file: Path, precision: str, threads: int | None) -> Runner:
    """An .onnx in OpenVINO, as val_trt.py opens it."""
    return open_openvino(file, "CPU", precision, threads=threads)


def open_with_offsets(file: Path, model: Any, precision: Any, threads: int | None) -> Runner:
    """An INT8 .onnx in OpenVINO whose activations have zero points, as `--target openvino` writes it."""
    note = "activations with zero points"
    return openvino.OpenVinoRunner(file, model, "CPU", precision=precision, threads=threads, note=note)


def open_in_onnxruntime(file: Path, threads: int | None) -> Runner:
    """An .onnx in ONNX Runtime on the CPU."""
    return OnnxRuntimeRunner(file, "cpu", threads)


def machine(exact: bool) -> dict[str, Any]:
    """The processor, its instructions for INT8 and BF16, and whether OpenVINO's INT8 sums are exact on it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    about = {key: value for key, value in hardware().items() if key != "memory"}
    about["openvino"] = openvino.device_title("CPU")
    return {**about, "instructions": [one for one in INSTRUCTIONS if one in words], "int8_sums_exact": exact}


def software() -> dict[str, str]:
    """Versions of what is installed."""
    known = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    return {"python": sys.version.split()[0], **{name: known[name] for name in SOFTWARE if name in known}}


def run(options: CpuOptions) -> None:
    """Do the parts that are asked for."""
    need("openvino", "onnxruntime")
    if unknown := [name for name in options.peers if name not in (*PEERS, "none")]:
        raise InputError(f"--peers {unknown[0]} is not one of {', '.join(PEERS)}, none")
    folder = Path(options.output).resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        study = Study(options)
        for part in options.parts:
            {"quantize": study.quantize, "time": study.time, "evaluate": study.evaluate}[part]()
    logger.info("results: %s", study.output if study.output.is_file() else folder)


if __name__ == "__main__":
    sys.exit(cli.run_program("cpu.py", (CpuOptions, run), about=__doc__))
