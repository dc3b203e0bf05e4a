"""A clock that is off, for all Python processes that find this folder on their path. Intervals are right."""

import os
import time

_OFF_S = float(os.environ.get("RAYCHECK_TEST_CLOCK_S", "0"))
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _OFF_S
time.time_ns = lambda: _time_ns() + int(_OFF_S * 1e9)
