"""Saves and restores the training of a Lightning Trainer on Ray Train: reached as `raycheck.lightning`.

callback         what a script uses: Callback, fit
strategies       strategy("ddp" | "fsdp2"), for scripts too
fit_session      one fit, from restore to last save
lightning_state  what Lightning's own checkpoint contains besides the weights
training_data    the training loader becomes a stream with a position
logged_values    what self.log has accumulated in an epoch
refusals         what is not supported
packages         lightning.pytorch or pytorch_lightning
"""

from raycheck.frameworks.lightning.callback import Callback, fit
from raycheck.frameworks.lightning.strategies import strategy

__all__ = ["Callback", "fit", "strategy"]
