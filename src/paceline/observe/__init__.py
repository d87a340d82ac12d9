"""What is seen while a run trains: metrics, console, trackers, trace, alerts, diagnosis.

In come step reports and gauges; out go `metrics.jsonl`, lines on the terminal, warnings, and the same lines for the
trackers. Drawing and explaining a run afterwards belongs in `report`, which reads what this package writes.
"""
