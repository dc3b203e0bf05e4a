"""Serves a web page over the runs below a prefix of a bucket: `raycheck page`. It uses raycheck's public names, and
the values of raycheck.views that they return.

- server.py answers requests: one handler per view.
- view_threads.py reads in threads, so many at a time and for so long, and once for all tabs of a live run.
- guard.py decides which requests are answered at all, and adds the headers that every answer has.
- pages.py makes the values that a view shows, and templates/ makes HTML of them, in which every text is escaped.
  The charts are drawn by raycheck.views, as in a notebook.
- acts.py does what a page with --edit offers; background_acts.py lets the long ones go on beside the requests.
- saved_page.py writes one run as a single file that needs no server.
- static/ has the style sheet and the script. Nothing is loaded from anywhere else.
"""
