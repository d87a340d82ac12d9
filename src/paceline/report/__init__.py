"""A run explained after the fact: one HTML page, plots, comparison of runs.

In come run directories; out goes a page that needs no network. Nothing here is called while a run trains.
"""
