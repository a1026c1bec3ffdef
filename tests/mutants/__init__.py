"""Seeded bugs: small patches, one a file in patches/, each of which the suite must catch. `make mutants` says by which test."""
