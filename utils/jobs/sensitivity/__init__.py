"""`qat.py sensitive`: which parts of a network hurt in INT8, and a recipe that keeps them in float.

run.py        the job: screening → AP of what matters → recipe
state.py      its files, and the state from which a killed run continues
units.py      the parts it asks about
screening.py  the passes over images that score units; confirming.py: the one that gives AP of states
search.py     from units to a choice; selection.py: its arithmetic
by_engine.py  the judge of --engine: what is built, and which point of the curve is chosen
engines.py    engines with parts in float, built and timed; exporting.py: their ONNX files
engine_points.py  what a difference of times means, and which point to choose
report.py     the summary, the chart and the recipe's file; engine_report.py: AP against milliseconds
"""
