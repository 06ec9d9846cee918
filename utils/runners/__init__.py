"""One interface to a network, whatever runs it: named inputs to named outputs.

base.py      Runner and TensorSpec: checks feeds, says what was received and what was expected; images as feeds
pytorch.py   a network in PyTorch, float or with fake quantizers
onnxrt.py    an ONNX file in ONNX Runtime
openvino.py  an ONNX file in OpenVINO, in INT8

The TensorRT form is `utils/trt/runner.py`; `utils/jobs/open.py` picks one by the file's name.
"""
