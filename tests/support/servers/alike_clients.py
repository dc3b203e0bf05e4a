"""Has all clients of S3 in a process share what each would find out for itself."""

import functools
import ssl
from inspect import isfunction
from typing import Any

import botocore.hooks
from aiobotocore.httpsession import AIOHTTPSession
from botocore.hooks import EventAliaser, HierarchicalEmitter
from botocore.loaders import JSONFileLoader


def make_clients_alike() -> None:
    """Has them share two megabytes of botocore's data, the names of its events, which of its functions take any keyword, and
    the certificates that a machine trusts: a third of all that the tests compute."""
    load_file = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, path: load_file(path)
    aliases = functools.cache(EventAliaser(HierarchicalEmitter())._alias_event_name)
    EventAliaser._alias_event_name = lambda _, name: aliases(name)
    accepts_kwargs = botocore.hooks.accepts_kwargs
    of_function = functools.cache(accepts_kwargs)  # no bound methods: their clients would never be closed
    botocore.hooks.accepts_kwargs = lambda call: (of_function if isfunction(call) else accepts_kwargs)(call)
    build = AIOHTTPSession._build_verify_context
    trusting: list[ssl.SSLContext] = []

    def context_of(session: Any) -> ssl.SSLContext:
        if session._verify is not True or session._cert_file:
            return build(session)
        if not trusting:
            trusting.append(build(session))
        return trusting[0]

    AIOHTTPSession._build_verify_context = context_of
