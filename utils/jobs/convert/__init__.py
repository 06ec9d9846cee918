"""`scripts/to_yolo.py`: Pascal VOC or COCO annotations → a dataset in YOLO's layout.

run.py       the job: read, join with the images, place, write
records.py   what a reader gives, and the tally of what was left out or changed
voc.py       XML files → records
coco.py      a COCO file → records
outlines.py  polygons and run lengths → one polygon an object
"""
