"""Measurements, most by the programs of a patched checkout and their reports; not copied into checkouts.

steps.py          what the studies share: options, checkout, times
claims.py         the numbers about accuracy that the documents quote, from results/
accuracy.py       what INT8 costs networks in AP, and what it gains in time
cpu.py            INT8 on a CPU beside NNCF and ONNX Runtime
busy.py           a forward on a CPU that others use, too, and the start of a program
peers.py          the files of NNCF and of ONNX Runtime
placement.py      FP16, INT8 in convolutions only and our placement as engines
video.py          images a second of whole programs, on a video and a folder
random_weights.py a checkpoint and a dataset for speed alone
"""
