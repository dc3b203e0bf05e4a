"""Adapters for frameworks that own the training loop: one module each, reached as `raycheck.transformers` and its like.

They use raycheck's public names only, so that everything they do can be done for another framework outside of this
package; a test holds that. versions.py refuses a framework that is absent or too old, shaped_module.py reads a model
into tensors by name.
"""
