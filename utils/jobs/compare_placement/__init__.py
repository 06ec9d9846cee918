"""Placements compared by the engines that TensorRT makes of them; `scripts/compare_placement.py` is the program.

variants.py   a model → ONNX files: float, convolutions only, ours
engines.py    ONNX files → engines → rows
table.py      rows → text, Markdown, JSON
"""
