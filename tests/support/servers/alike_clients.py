"""Has all clients of S3 in a process share what each would find out for itself."""

import functools
from inspect import isfunction

import botocore.hooks
from botocore.hooks import EventAliaser, HierarchicalEmitter
from botocore.loaders import JSONFileLoader


def make_clients_alike() -> None:
    """Has them share two megabytes of botocore's data, the names of its events, and which of its functions take any keyword:
    a quarter of all that the tests compute."""
    load_file = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, path: load_file(path)
    aliases = functools.cache(EventAliaser(HierarchicalEmitter())._alias_event_name)
    EventAliaser._alias_event_name = lambda _, name: aliases(name)
    accepts_kwargs = botocore.hooks.accepts_kwargs
    of_function = functools.cache(accepts_kwargs)  # no bound methods: their clients would never be closed
    botocore.hooks.accepts_kwargs = lambda call: (of_function if isfunction(call) else accepts_kwargs)(call)
