"""Finds AWS credentials for both s3fs and obstore: botocore's whole chain, and a role on top where one is set.

botocore examines the environment, profiles, SSO, web identities (IRSA), credential_process, containers and instance
roles, and renews what it has found 10 to 15 minutes before it expires. Both clients ask again before their credentials
have expired.
"""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.configprovider import ConfiguredEndpointProvider
from botocore.credentials import AssumeRoleCredentialFetcher, Credentials, DeferredRefreshableCredentials
from botocore.exceptions import NoCredentialsError
from botocore.session import Session

from raycheck.bucket.store.jitter import draw_apart
from raycheck.storage_settings import StorageSettings

LEASE_S = 60
SESSION_NAME = "raycheck"


class CredentialChain:
    """The credentials of one store, found on first use. Raises botocore's errors, which s3/errors.py translates."""

    def __init__(self, settings: StorageSettings) -> None:
        draw_apart("botocore")
        self._settings = settings
        self._lock = threading.Lock()
        self._credentials: Credentials | None = None
        self._session = Session(profile=settings.profile)
        if settings.ca_bundle:
            self._session.set_config_variable("ca_bundle", settings.ca_bundle)

    def located(self) -> StorageSettings:
        """Return the settings, with region, endpoint and CA bundle from the profile where the settings have none."""
        session = self._session
        endpoint = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
        found = {name: session.get_config_variable(name) or None for name in ("region", "ca_bundle")}
        return self._settings.over(StorageSettings(endpoint=endpoint or None, **found))

    def has_variant_endpoint(self) -> bool:
        """Return whether environment or profile request hosts (FIPS, dual stack) whose names only botocore knows."""
        return any(map(self._session.get_config_variable, ("use_fips_endpoint", "use_dualstack_endpoint")))

    def frozen(self) -> Any:
        """Return access key, secret and token, valid for the next minutes. May query a service or run a process."""
        return self._load().get_frozen_credentials()

    def needs_time(self) -> bool:
        """Return whether `frozen` may have to query a service or run a process."""
        return self._credentials is None or self._expires_within(15 * 60)

    def for_obstore(self) -> dict[str, Any]:
        """Return the credentials as obstore's provider; they expire there well before they do in botocore."""
        frozen = self.frozen()
        lease = timedelta(seconds=0 if self._expires_within(2 * LEASE_S) else LEASE_S)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + lease,
        }

    def _expires_within(self, seconds: int) -> bool:
        refresh_needed = getattr(self._credentials, "refresh_needed", None)
        return refresh_needed is not None and bool(refresh_needed(refresh_in=seconds))

    def _load(self) -> Credentials:
        with self._lock:
            if self._credentials is None:
                found = self._session.get_credentials()
                if found is None:
                    raise NoCredentialsError
                self._credentials = self._assumed(found) if self._settings.role_arn else found
            return self._credentials

    def _assumed(self, source: Credentials) -> Credentials:
        """Return the credentials of the role, which are renewed from `source` for as long as `source` is valid."""
        extra = {"RoleSessionName": SESSION_NAME}
        if self._settings.external_id:
            extra["ExternalId"] = self._settings.external_id
        region = self._settings.region or self._session.get_config_variable("region") or "us-east-1"

        def client(service: str, **options: Any) -> Any:
            return self._session.create_client(service, region_name=region, **options)

        fetcher = AssumeRoleCredentialFetcher(client, source, self._settings.role_arn, extra_args=extra)
        return DeferredRefreshableCredentials(refresh_using=fetcher.fetch_credentials, method="assume-role")
