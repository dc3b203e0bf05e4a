"""The kinds of things that a user may put into the state, each as an entry with named tensors and values."""
