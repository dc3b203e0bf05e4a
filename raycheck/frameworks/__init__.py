"""Adapters for frameworks that own the training loop, one package each, such as `raycheck.transformers`.

They use raycheck's public names only, so an adapter for another framework can be written outside this package; a test
enforces this. versions.py refuses a framework that is missing or too old. shaped_module.py makes a module from named
tensors.
"""
