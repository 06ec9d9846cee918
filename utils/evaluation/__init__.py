"""One evaluation loop for every runner (PyTorch, ONNX Runtime, TensorRT).

data_yaml.py    data.yaml → DataConfig
find_images.py  a split's image files and their label files
images.py       these, read and checked; quiet_decoders.py: decoded, without the decoders' own complaints
fingerprint.py  has a dataset changed since a run began?
sources.py      images and videos that a user names, to draw on
letterbox.py    letterboxing, there and back; device_letterbox.py: with torch's operators, where the network is
mask_truth.py   polygons as masks, packed to bits
per_image.py    rows of several images in one tensor
batch.py        images with their labels, as the loader gives them
dataset.py      all together: batches, read ahead by worker processes; augmented.py: seeds for each augmented image
shares.py       batches that several processes share
input_plan.py   what a network wants to be given, and what it gives
detector.py     runner + NMS: batches of images → detections
prefetch.py     the next batch on its way: copied to the GPU, or through the network, while this one is used
masks.py        masks of detections, and their overlap with those of labels; mask_files.py: in the images' pixels
mask_patches.py the same for drawing: one mask at a time
given_masks.py  masks that a network with NMS inside gives
nms.py          raw predictions → detections; batched_nms.py: of a whole batch at once
metrics.py      detections and labels → precision, recall, AP
statistics.py   what is kept of each image, until there is AP
bootstrap.py    AP on resamplings of the images: standard errors
coco.py         predictions as COCO JSON, pycocotools
coco_annotations.py    annotations, checked; coco_segmentations.py: their masks
predictions.py  detections as files
loop.py         evaluate(runner, data, config) → EvalResult
results.py      what an evaluation found, and how it is printed
proxy.py        distance of predictions without labels and without NMS
"""
