"""`qat.py sensitive`: which parts of a network hurt in INT8, and a recipe that keeps them in float.

run.py     the job: calibrate, search, place the recipe anew, report
units.py   the parts that it asks about, and what they cost
passes.py  the passes over images: scores of units, AP of states
search.py  from units to a choice of them
report.py  the state of a run, and its results: the summary, the chart, the recipe's file
"""
