"""What Ray is told: ray_reports.py reports commits to Ray Train, ray_metrics.py exports metrics."""
