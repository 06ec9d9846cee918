"""Engines that nothing runs, with the notes that a build would have written beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from utils.trt.engine_file import EngineNote
from utils.trt.preflight import OnnxFile

SHAPES = {"images": ((1, 3, 64, 96), (8, 3, 64, 96), (16, 3, 64, 96))}


def write_engine(path: Path, onnx_file: Path, shapes=SHAPES, **more) -> Path:
    """A file and the note of an engine that build_engine.py would have built."""
    file = OnnxFile.read(onnx_file)
    path.write_bytes(b"a plan")
    note = EngineNote(
        onnx=str(onnx_file), api="TensorRT 10.13.0", gpu="Fake GPU", precision="fp16", metadata=dict(file.metadata),
        profile={name: [list(shape) for shape in three] for name, three in shapes.items()},
        tensors=file.tensors,
    )  # fmt: skip
    replace(note, **more).save(path)
    return path
