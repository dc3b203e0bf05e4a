"""Positions in Ray Data: ray_data.py is RayData, row_set.py the rows that were consumed."""
