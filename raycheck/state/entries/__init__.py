"""Turns each object in the user's state into an entry, which saves and restores that kind of object.

| object in the state | module | entry |
|---|---|---|
| torch module: plain, DDP, FSDP2, torch.compile, PEFT | module/module_entry.py | ModuleEntry |
| optimizer in torch's form | optimizer/optimizer_entry.py | OptimizerEntry |
| anything else with state_dict and load_state_dict | object_entry.py | ObjectEntry |
| dict of plain values | plain_value_entry.py | ObjectEntry around InPlace |
| a single number, string, tensor, list, ... | plain_value_entry.py | PlainValueEntry |
| random generator | random_generators.py | ObjectEntry around GeneratorState |
| PerRank: each rank's own value | per_rank_entries.py | PerRankEntry |
| data loader that reports its position | per_rank_entries.py | LoaderEntry |
| RankZero: one object outside the ranks, such as an actor's state | per_rank_entries.py | RankZeroEntry |
| engine of DeepSpeed, by its parts | deepspeed_engine.py | EngineModelEntry, OptimizerEntry, ObjectEntry |
| raycheck.adapters.megatron, by its parts | megatron_training.py | MegatronModelEntry, MegatronOptimizerEntry, ... |
| torchmetrics' metrics | metric_entry.py | MetricsEntry |
| tokenizer or processor | hf_assets.py | FilesEntry |

state_entry.py defines the contract, and saved_entry.py describes one entry in a checkpoint. The other modules serve
several kinds: wrappers.py removes Accelerate's and Ray's wrappers, fill_in_place.py puts values into live containers,
value_classes.py decides which classes values may have, meta_tensors.py gives memory to tensors on the meta device,
unsaved_tensors.py refuses objects whose tensors nothing would save, and engines.py refuses DeepSpeed's and Megatron's.

To add a kind of object:

1. Try the simplest way first. An object with state_dict and load_state_dict becomes an ObjectEntry without any work. An
   adapter that gives an object these two methods (GeneratorState is one) is enough, too.
2. Otherwise subclass the nearest entry in a new module. `tree` and `values` return what a save takes. `match` returns
   the tensors to read into and records every difference in the SavedEntry; it changes nothing. `load` restores the
   values. State in the module's docstring what a restore with another number of ranks does.
3. Recognize the object in `_make_entry` of make_entries.py, before the kinds that would also accept it. Do not import
   its library: look at attributes, or at the names of its module and class.
4. Test it in tests/state/entries: saved and restored exactly, every difference named, nothing changed when refused.
"""
