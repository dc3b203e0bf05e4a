"""Describes what lies in a run, for people: plain values that the command line, a page and a notebook all show.

- attempts.py and history.py tell what happened to a run: its attempts, why each ended, its commits, its goodput.
- live.py watches a run: its speed, and the save under way.
- tensors.py lists a checkpoint's tensors, with the moments of each parameter under it.
- difference.py compares two checkpoints by their checksums, without reading a tensor.
- tensor_sample.py reads some of a tensor's values within a byte budget, and describes them.
- kept.py says why each checkpoint stays.
- charts.py computes where the lines and bars of a chart lie, drawing.py writes it as SVG, and notebook.py is what a
  notebook shows.
- context_pool.py has threads that obey one deadline for all requests of a view.
- in_words.py says sizes, times and numbers as people read them.
- element_types.py turns a tensor's bytes into numbers without torch.

Nothing here writes (I8), or imports torch or ray.
"""
