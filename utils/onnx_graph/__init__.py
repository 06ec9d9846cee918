"""Everything that is done to an ONNX graph.

- `export.py`   torch network → ONNX file: tracing, the passes below, checks, metadata
- `passes.py`   pure functions, ModelProto → ModelProto; `qdq_passes.py` those over quantizers; `editing.py` their tools
- `parts.py`, `alignment.py` passes for INT8 kernels: a convolution for each part of a result that is read in parts;
                channels in whole blocks; the third is `qdq_passes.convolve_pools`
- `half.py`     the pass that turns the float body of a network to FP16
- `network.py`  checkpoint → network and metadata, float or quantized
- `forms.py`    what stands behind the raw predictions: NMS, DeepStream's rows; `deepstream.py` the texts for the latter
- `parity.py`   does a file compute what the network computes? `agreement.py`: between quantizers, in INT8 steps
- `delivery.py` all of it in order, for the programs
- `verify.py`   does a Q/DQ graph have the properties that TensorRT turns into speed? `rules.py` holds them as data,
                `context.py` what they ask about a graph
- `graph.py`    look-ups that all of them need: who makes a tensor, who reads it, what is constant

Nothing here imports upstream or a quantizer library; `agreement.py`, `delivery.py`, `export.py`, `network.py` and
`parity.py` import torch.
"""
