"""Commands that programs offer to their users, as lists of words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


def export_command(weights: str) -> list[str]:
    """Return the command that exports a checkpoint."""
    return ["python", "export_qat.py", "--weights", weights, "--include", "onnx", "--simplify", "--dynamic", "batch"]


def verify_command(file: str) -> list[str]:
    """Return the command that verifies an ONNX file."""
    return ["python", "export_qat.py", "--verify", file]


def build_command(file: str, size: str = "") -> list[str]:
    """Return the command that builds an engine of an ONNX file, for an input of `size` pixels."""
    command = ["scripts/generate_trt_engine.sh", file]
    if size:
        command.append(size)
    return command


def benchmark_command(file: str) -> list[str]:
    """Return the command that measures the speed of an engine."""
    return ["python", "scripts/benchmark_trt.py", file]


def evaluation_command(
    file: str, *, reference: str, data: str, split: str = "", unlabelled: bool = False, in_openvino: bool = False
) -> list[str]:
    """Return the command that evaluates a file.

    Args:
        reference: the FP32 model to compare with; empty for none.
        data: the dataset's YAML; a placeholder stands in its place if it is empty.
        split: the split to evaluate; empty for the default, val.
        unlabelled: the images have no labels.
        in_openvino: OpenVINO runs the file.
    """
    command = ["python", "val_trt.py", file]
    if in_openvino:
        command += ["--runtime", "openvino"]
    if reference:
        command += ["--reference", reference]
    command += ["--data", data or "DATA.yaml"]
    if split:
        command += ["--task", split]
    if unlabelled:
        command.append("--unlabelled")
    return command


@dataclass(frozen=True)
class AfterExport:
    """The place where a file was exported, which decides the commands that follow.

    Attributes:
        has_gpu: an engine can be built here.
        data: the dataset's YAML; empty if it does not exist here.
        reference: the FP32 checkpoint that an INT8 file was made from; empty for an FP32 file, or if it is not known.
        unlabelled: the images have no labels.
    """

    has_gpu: bool
    data: str
    reference: str
    unlabelled: bool

    def lines(self, path: str, *, engine_only: bool, for_openvino: bool = False) -> list[str]:
        """Return the lines that follow the export of a file: without a GPU, the evaluation that is possible here first.

        Args:
            engine_only: the file holds a TensorRT plugin, which ONNX Runtime cannot run.
            for_openvino: the file is for OpenVINO, and no engine is built of it.
        """
        build = shlex.join(build_command(path))
        if self.has_gpu and not for_openvino:
            return [f"next: {build}"]
        if engine_only:
            return [f"next, on the machine with the GPU: {build}"]
        evaluation = evaluation_command(
            path, reference=self.reference, data=self.data, unlabelled=self.unlabelled, in_openvino=for_openvino
        )
        lines = [f"next: {shlex.join(evaluation)}"]
        if not for_openvino:
            lines.append(f"then, on the machine with the GPU: {build}")
        return lines
