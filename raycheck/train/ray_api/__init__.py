"""Every name of Ray that may change between its releases, feature-detected."""
