"""Programs one after the other, each a step that is not run again once it has ended.

steps.py      a step, and the pipeline that runs it, reuses it, or continues it
quickstart.py from a trained model to a report: scripts/quickstart.sh
engine.py     from a checkpoint to the AP of its engine: scripts/val_trt.sh
"""
