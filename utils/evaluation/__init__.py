"""One evaluation loop for every runner (PyTorch, ONNX Runtime, TensorRT).

data_yaml.py   data.yaml → DataConfig
pictures.py    a split's picture files and their labels, checked
preprocess.py  letterboxing, there and back
dataset.py     both together: batches, read ahead by worker processes
nms.py         raw predictions → detections
scoring.py     detections and labels → precision, recall, AP
coco.py        predictions as COCO JSON, pycocotools
loop.py        evaluate(runner, data, config) → EvalResult
"""
