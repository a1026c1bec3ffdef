"""kvstore under Mooncake's name: see kvstore.engines.mooncake. Not to be installed beside the package of that name."""
