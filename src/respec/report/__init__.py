"""What a run leaves behind and what it shows: the run folder, the live view, the HTML report, the names of all metrics."""
