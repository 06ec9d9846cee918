"""Serving with NVIDIA Triton Inference Server: model repositories, their check, and a client.

schema.py       the fields of Triton's ModelConfig, as its model_config.proto has them
pbtxt.py        config.pbtxt: the text format of protobuf, written and read along the schema
served_file.py  what a server has to know about an ONNX file or an engine
config.py       a file → the configurations of its models
nms_model.py    the model behind raw predictions, for Triton's Python backend; it is shipped as it stands
repository.py   a model repository on disk, whole or not at all
checks.py       is a repository one that a server loads?  config_checks.py: of each configuration by itself;
                ensembles.py: do the steps of an ensemble fit together?
protocol.py     what is asked of a server; http_protocol.py, grpc_protocol.py: the two ways to ask
runner.py       the Runner on a model of a server
load.py         latency and throughput of several clients side by side
"""
