"""Buckets of a real server with settings that somebody has made: versioning, object lock, rules that delete by age."""

from contextlib import closing
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import botocore.session
from botocore.config import Config

FROZEN_RULE = {"ID": "tidy up", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 30}}
"""What people set on a bucket of temporary files, and what deletes frozen parameters."""


def planted_bucket(
    uri: str, *, rules: list[dict] | None = None, versioning: bool = False, lock: dict | None = None
) -> str:
    """Makes another bucket on the S3 server of `uri`, by the server's own API. Returns the address of runs/my-run in it.

    rules: of its lifecycle. lock: the default retention of its objects.
    """
    query = urlsplit(uri).query
    endpoint, name = parse_qs(query)["endpoint_override"][0], f"b{uuid4().hex[:20]}"
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    more: dict[str, Any] = {"endpoint_url": f"http://{endpoint}", "region_name": "us-east-1", "config": config}
    with closing(botocore.session.get_session().create_client("s3", **more)) as client:
        client.create_bucket(Bucket=name, **({"ObjectLockEnabledForBucket": True} if lock else {}))
        if versioning:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        if rules:
            client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": rules})
        if lock:
            rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": lock}}
            client.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=rule)
    return f"s3://{name}/runs/my-run?{query}"
