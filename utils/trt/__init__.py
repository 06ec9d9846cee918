"""TensorRT: from an ONNX file to an engine, running it, timing it, looking inside.

tensorrt_api.py    the only importer of TensorRT; what its version can do
onnx_summary.py    what a builder has to know about an ONNX file
build_config.py    how an engine is built; build_preflight.py: whether file, version and GPU go together
builder.py         builds with TensorRT's Python module
tune.py            builds in a process that can be ended: one, or of several options, of which the fastest stays
trtexec.py         builds and times with NVIDIA's program
engine_file.py     engines on disk, and the note beside each
runner.py          an engine's execution context with buffers, and the Runner on it
timing.py          times of engines, in turns, as trtexec takes and tells them
benchmark.py       engines over batch sizes and contexts, as rows
inspector.py       layers of an engine; layer_report.py: in words, and drawn
"""
