"""Reports to Ray: ray_reporter.py reports commits to Ray Train, ray_metrics.py exports metrics."""
