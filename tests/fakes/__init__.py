"""Libraries that do not exist, for tests of peers; importable from the timing process too."""
