"""Transport `nixl`: a TransferAgent over NIXL."""
