"""A list of runs that takes long to read is shown as it was at the last look, until it has been read again."""

import urllib.request
from urllib.error import HTTPError
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.background_call import InThread
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.page_server import TOKEN, page_server

LONGER_S = 1.2
OLD = "The page is reading a newer one."


def view(address: str, path: str = "") -> str:
    cookie = f"raycheck-token-{urlsplit(address).port}={TOKEN}"
    with urllib.request.urlopen(urllib.request.Request(address + path, headers={"Cookie": cookie}), timeout=60) as got:
        return str(got.read().decode())


def test_a_long_list_is_shown_as_it_was_and_once_read_again_it_is_the_newest(wire: FaultProxy) -> None:
    prefix = join_uri(wire.uri, uuid4().hex)
    save_state(open_store(join_uri(prefix, "one")), {"model": torch.nn.Linear(2, 2)}, save_number=1, step=1)
    wire.rule("delay", "GET", "latest", delay_s=LONGER_S)

    with page_server(prefix) as address:
        first = view(address)
        save_state(open_store(join_uri(prefix, "two")), {"model": torch.nn.Linear(2, 2)}, save_number=1, step=1)
        held = wire.rule("hold", "GET", "one/latest")
        old = [view(address) for _ in range(2)]
        held.wait()
        newest = InThread(lambda: view(address, "?newest=1"))
        held.release()
        found = newest.join()

    assert OLD not in first
    assert all(OLD in text and 'href="run?name=one"' in text and "two" not in text for text in old)
    assert OLD not in found
    assert 'href="run?name=two"' in found


def test_a_list_that_can_no_longer_be_read_is_an_error_and_not_the_old_list_for_ever(wire: FaultProxy) -> None:
    prefix = join_uri(wire.uri, uuid4().hex)
    save_state(open_store(join_uri(prefix, "one")), {"model": torch.nn.Linear(2, 2)}, save_number=1, step=1)
    wire.rule("delay", "GET", "latest", delay_s=LONGER_S)

    with page_server(prefix) as address:
        view(address)
        wire.rule("deny", "GET", "", times=1000)
        with pytest.raises(HTTPError, match="502"):
            view(address, "?newest=1")
        with pytest.raises(HTTPError, match="502"):
            view(address)
