"""Describes the contents of a run for people: plain values that the command line, the page, and notebooks show.

- attempts.py and history.py describe what happened to a run: its attempts, why each ended, its commits, its goodput.
- live.py watches a run: its speed, and the save under way.
- details.py says how a checkpoint was saved and what is in it; tensors.py lists its tensors, with the moments of each
  parameter under it.
- difference.py compares two checkpoints by their checksums, without reading a tensor.
- tensor_sample.py reads some of a tensor's values within a byte budget, and describes them.
- kept.py explains why each checkpoint is kept.
- charts.py computes the positions of a chart's lines and bars, drawing.py writes it as SVG, and notebook.py renders the
  views in a notebook.
- context_pool.py has threads that obey one deadline for all requests of a view.
- in_words.py formats sizes, times, and numbers for people.
- element_types.py turns a tensor's bytes into numbers without torch.

Nothing here writes (I8) or imports torch or ray.
"""
