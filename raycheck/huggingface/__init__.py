"""Writes a checkpoint as a Hugging Face directory, straight from the bucket and in bounded memory.

An export passes through these files in order:

- export.py is the entry: it lays out the files, opens the destination, and writes them.
- export_contents.py decides which weights, configuration and tokenizer files to write, from the index alone.
- lora.py gives a LoRA adapter the names that peft expects, or describes how it is merged into the model's weights.
- weight_stream.py reads saved tensors as one stream of file bytes, and adds a merged adapter on the way.
- destination.py makes the directory appear as a whole or not at all.

The user's choices are in one `ExportOptions` (settings.py), which is passed along unchanged.
"""
