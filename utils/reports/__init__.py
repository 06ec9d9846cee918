"""Reports of runs, as data, tables, figures and a page.

schema.py      Report, Row, Sample: what programs fill in and JSON holds; the machine that results depend on
tables.py      results as text
figures.py     plots; curve_figures.py: PR and F1 curves, confusion matrix; detections.py: images with boxes and masks
page.py        the page and all other files of a report, and several put together
"""
