"""Commands that inspect checkpoints and watch runs: `tensors`, `diff`, `top`, `page`."""
