"""`qat.py sensitive`: which parts of a network hurt in INT8, and a recipe that keeps them in float.

run.py     the job: calibrate, search, place the recipe anew, report
units.py   the parts that it asks about, and what they cost
prediction_distance.py  how far predictions are from those of the float network, without labels and without NMS
search.py  from units to a choice of them, by passes over images: scores of units, AP of states
report.py  the results of a run: the summary, sentences, the chart
"""
