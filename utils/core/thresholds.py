"""Confidence threshold and NMS IoU: those of AP, and those of detections that a person looks at."""

from __future__ import annotations

# AP wants every detection; these are the defaults of upstream's val.py
AP_CONFIDENCE, AP_NMS_IOU = 0.001, 0.7
# the defaults of upstream's detection program, and of networks with NMS in the file
EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU = 0.25, 0.45
MASK_AP_NMS_IOU = 0.6  # that of upstream's val.py for segmentation
