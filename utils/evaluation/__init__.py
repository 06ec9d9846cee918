"""One evaluation loop for every runner (PyTorch, ONNX Runtime, TensorRT).

config.py       settings of an evaluation: EvalConfig
data_yaml.py    data.yaml → DataConfig
image_files.py  image files: found, their sizes read, decoded
labels.py       label files: found, read and checked
split.py        the images of a split with their labels, and counts of what was read
letterbox.py    letterboxing, there and back
batch.py        images with their labels, as the loader gives them; polygons as masks
disk_state.py   what is on disk, as a hash of each part
dataset.py      all together: batches, read ahead by worker processes, shared by several programs
input_plan.py   size and number of images that a network is given
detector.py     runner + NMS: batches of images → detections
masks.py        masks of detections, their overlap with those of labels, and in the pixels of images
nms.py          raw predictions → detections
stage_clock.py  times of a batch's stages, on the device that works
confusion.py    the classes that are taken for others
metrics.py      detections and labels, image by image → precision, recall, AP
bootstrap.py    its standard error, by resampling the images
coco_file.py    annotations in COCO's JSON, whose parts are joined by ids
coco.py         predictions as files: text, COCO JSON; pycocotools
loop.py         evaluate(runner, data, config) → EvalResult; Evaluation: update, gather, result
results.py      the result of an evaluation, and its table
"""
