"""TensorRT: from an ONNX file to an engine, running it, timing it, looking inside.

tensorrt_api.py    the only importer of TensorRT; what its version can do
build_options.py   options and settings of a build
onnx_file.py       description of an ONNX file
preflight.py       whether file, options, version and GPU go together
build.py           builds with TensorRT's Python module
tune.py            builds engines with different options, and keeps the fastest
engine_file.py     engines on disk, and the note beside each
runner.py          an engine's execution context with buffers, and the Runner on it
timing.py          times of engines, interleaved, as trtexec takes and tells them
benchmark.py       engines over batch sizes, as rows
layers.py          layers of an engine, inspected: a report, and drawn
"""
