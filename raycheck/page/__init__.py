"""Serves a web page with the runs under a prefix of a bucket: `raycheck page`. It uses raycheck's public names and the
values of raycheck.views that they return.

- server.py answers requests: one handler per view.
- view_threads.py reads in threads, with limits on their number and time, and once for all tabs of a live run.
- guard.py decides which requests are answered, and adds the headers of every response.
- pages.py computes the values that a view shows, and templates/ renders them as HTML, in which every text is escaped.
  The charts are drawn by raycheck.views, as in a notebook.
- acts.py has the actions of a page with --edit; background_acts.py runs the long ones in the background.
- saved_page.py saves the view of one run as a single file that needs no server.
- static/ has the style sheet and the script. Nothing is loaded from other sites.
"""
