"""The conformance suites that every Connection and TransferAgent has to pass. Needs the `dev` extra."""
