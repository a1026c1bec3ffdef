"""NIXL as a TransferAgent."""
