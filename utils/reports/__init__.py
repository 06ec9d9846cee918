"""What a run reports, as data, tables, figures and a page.

schema.py      Report, Sample: what programs fill in and JSON holds; rows.py: Row, one measured result
limits.py      how much a report's JSON may hold
machine.py     machine and libraries that results depend on
tables.py      results as text
figures.py     plots; detections.py: images with boxes and masks; outlines.py: masks as polygons
html.py        the page
files.py       reports as files, and several put together
"""
