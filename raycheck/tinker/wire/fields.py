"""Reads single fields of a JSON body. A missing field, or one of the wrong type, raises RefusedRequestError by name."""

import json
import re
from collections.abc import Mapping
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
"""Valid checkpoint names. raycheck allows names of 100 characters, and the kind precedes this one."""
MIN_TTL_S, MAX_TTL_S = 3600, 315_360_000
MAX_METADATA_BYTES = 1000
MAX_TEXT = 512
MAX_TAGS = 64


class RefusedRequestError(Exception):
    """The request is invalid. status: the HTTP status; the SDK does not retry the ones used here."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def text_in(body: Mapping[str, Any], name: str) -> str:
    """Return a required string."""
    value = body.get(name)
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT:
        raise RefusedRequestError(f"{name}: give a text of 1 to {MAX_TEXT} characters", 422)
    return value


def optional_text_in(body: Mapping[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else text_in(body, name)


def number_in(body: Mapping[str, Any], name: str) -> int:
    """Return a required integer of at least 0."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise RefusedRequestError(f"{name}: give a whole number of at least 0", 422)
    return value


def optional_number_in(body: Mapping[str, Any], name: str) -> int | None:
    return None if body.get(name) is None else number_in(body, name)


def flag_in(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise RefusedRequestError(f"{name}: give true or false", 422)
    return default if value is None else value


def dict_in(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object; a missing or null one is empty."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RefusedRequestError(f"{name}: give an object", 422)
    return value or {}


def checkpoint_name_in(body: Mapping[str, Any], name: str = "path") -> str:
    """Return a client's name for a checkpoint."""
    value = body.get(name)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise RefusedRequestError(
            f"{name}: a checkpoint's name has 1 to 80 letters, digits, '_' and '-', and not {str(value)[:100]!r}", 422
        )
    return value


def ttl_in(body: Mapping[str, Any]) -> int | None:
    """Return ttl_seconds, or None for a checkpoint that does not expire."""
    value = body.get("ttl_seconds")
    if value is None:
        return None
    if type(value) is not int or not MIN_TTL_S <= value <= MAX_TTL_S:
        raise RefusedRequestError(
            f"ttl_seconds={value!r}: give {MIN_TTL_S} (an hour) to {MAX_TTL_S} (ten years), or null for no expiry"
        )
    return value


def tags_in(body: Mapping[str, Any]) -> list[str]:
    """Return a session's tags."""
    tags = body.get("tags") or []
    if not isinstance(tags, list) or len(tags) > MAX_TAGS:
        raise RefusedRequestError(f"tags: give a list of at most {MAX_TAGS} texts")
    if not all(isinstance(tag, str) and len(tag) <= MAX_TEXT for tag in tags):
        raise RefusedRequestError(f"tags: each must be a text of at most {MAX_TEXT} characters")
    return tags


def metadata_in(body: Mapping[str, Any], name: str = "user_metadata") -> dict[str, str]:
    """Return a user's metadata: strings by name, small enough to store with each checkpoint."""
    found = {}
    for key, value in dict_in(body, name).items():
        if not isinstance(value, str | int | float | bool):
            raise RefusedRequestError(f"{name}: {key[:100]!r} must be a text", 422)
        found[key] = value if isinstance(value, str) else str(value)
    size = len(json.dumps(json.dumps(found)))  # as stored in a checkpoint's note
    if size > MAX_METADATA_BYTES:
        raise RefusedRequestError(f"{name} has {size} bytes; at most {MAX_METADATA_BYTES} are allowed")
    return found
