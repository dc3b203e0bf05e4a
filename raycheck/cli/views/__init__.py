"""Commands that look into checkpoints: their tensors, and how two of them differ."""
