"""Serves a coordinator to ranks that are processes of their own, to test without Ray what all of them do together."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from raycheck.bucket.protocol.resume import AUTO
from raycheck.train.group import same
from raycheck.train.served_group import Served, ServedGroup, serve


@dataclass(frozen=True, kw_only=True)
class Place:
    """Says where the coordinator of one start of a group is: plain values, to be sent to each rank."""

    id: str
    uri: str
    served: Served

    def group(self, rank: int, world_size: int) -> ServedGroup:
        return ServedGroup(
            id=self.id,
            uri=self.uri,
            rank=rank,
            world_size=world_size,
            coordinator=self.served,
            broadcast=_broadcast if world_size > 1 else same,
            is_first_on_node=not rank,
        )


def new_place(uri: str) -> Place:
    """Start a coordinator in this process, for a group that starts."""
    return Place(id=uuid4().hex, uri=uri, served=serve(uri, AUTO))


def _broadcast(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
