"""Commands that inspect checkpoints and watch runs: `tensors`, `diff`, `history`, `top`, `watch`, `page`."""
