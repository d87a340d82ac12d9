"""A run explained after the fact: one HTML page, plots, comparison of runs.

In come run directories; out come pages that need no network. Numbers are computed here, the templates beside this file
say how they look. Nothing here is called while a run trains; `observe` never imports it.
"""
