"""Serving with NVIDIA Triton Inference Server: configurations of models, NMS, and a runner on a served model.

options.py    options of make_triton.py
config.py     a file and options → the configurations of its models, as Triton's own protobuf messages
nms_model.py  the model behind raw predictions, for Triton's Python backend; it is shipped as it stands
runner.py     the Runner on a served model, through tritonclient
"""
